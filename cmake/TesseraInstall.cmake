# The whole library as one target, tessera::tessera, and its install rules:
# find_package(Tessera CONFIG), pkg-config's tessera.pc, headers, the program.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

add_library(tessera_all INTERFACE)
add_library(tessera::tessera ALIAS tessera_all)
set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
foreach(room IN LISTS TESSERA_ROOMS)
  list(APPEND _tessera_room_targets tessera_${room})
endforeach()
target_link_libraries(tessera_all INTERFACE ${_tessera_room_targets})

set(_tessera_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Tessera")
install(TARGETS tessera_all tessera_options ${_tessera_room_targets}
  EXPORT TesseraTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${_tessera_cmake_dir})

# Public headers: all but those of private folders, which only our sources include.
set(_tessera_private PATTERN detail EXCLUDE)
foreach(folder IN LISTS TESSERA_PRIVATE_FOLDERS)
  list(APPEND _tessera_private PATTERN "tessera/${folder}" EXCLUDE)
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/tessera" "${TESSERA_GENERATED}/tessera"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" ${_tessera_private})

# A package goes to machines where LibTorch is elsewhere: it names none.
set(TESSERA_TORCH_INSTALLED "${TESSERA_TORCH}")
if(TESSERA_PACKAGE)
  set(TESSERA_TORCH_INSTALLED "")
endif()
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/TesseraConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/TesseraConfig.cmake" INSTALL_DESTINATION ${_tessera_cmake_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/TesseraConfig.cmake"
  "${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/TesseraTorch.cmake"
  DESTINATION ${_tessera_cmake_dir})

# For pkg-config the rooms are listed last room first, as a linker wants them.
foreach(room IN LISTS _tessera_room_targets)
  get_target_property(type ${room} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    string(PREPEND TESSERA_PC_ROOMS " -l${room}")
  endif()
endforeach()
foreach(library IN LISTS TESSERA_SYSTEM_LIBRARIES)
  if(library MATCHES "^[-/]")  # a flag or a path
    string(APPEND TESSERA_PC_SYSTEM " ${library}")
    continue()
  endif()
  string(APPEND TESSERA_PC_SYSTEM " -l${library}")
endforeach()
list(JOIN TESSERA_TORCH_LINK_FLAGS " " TESSERA_PC_TORCH)
string(REPLACE "${TESSERA_TORCH}/" "\${torch}/" TESSERA_PC_TORCH "${TESSERA_PC_TORCH}")
set(TESSERA_PC_TORCH_FOLDER "${TESSERA_TORCH}")
if(TESSERA_PACKAGE)
  set(TESSERA_PC_TORCH_FOLDER "/say/--define-variable=torch=FOLDER")
  string(REPLACE "-rpath-link" "-rpath" TESSERA_PC_TORCH "${TESSERA_PC_TORCH}")
endif()
# The file finds the rest from where it lies, however deep that is (Debian's
# lib/x86_64-linux-gnu); folders that are absolute stay so.
file(RELATIVE_PATH TESSERA_PC_UP
  "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
foreach(folder LIBDIR INCLUDEDIR)
  set(TESSERA_PC_${folder} "\${prefix}/${CMAKE_INSTALL_${folder}}")
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${folder}}")
    set(TESSERA_PC_${folder} "${CMAKE_INSTALL_${folder}}")
  endif()
endforeach()
configure_file("${PROJECT_SOURCE_DIR}/cmake/tessera.pc.in"
  "${PROJECT_BINARY_DIR}/tessera.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/tessera.pc"
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/NOTICE"
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
