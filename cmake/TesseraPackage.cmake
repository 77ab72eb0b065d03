# What cpack makes of a TESSERA_PACKAGE build: a .deb and a .tar.gz, each with the
# program, the library, and the libraries of LibTorch that the program needs.
include_guard(GLOBAL)

# Copies the licence of `name`: what the patterns find.
function(tessera_licence name)
  file(GLOB found ${ARGN})
  if(NOT found)
    message(FATAL_ERROR "A package needs the licence of ${name}, which is not in ${ARGN}")
  endif()
  foreach(path IN LISTS found)
    file(REAL_PATH "${path}" path)  # Debian's may be links
    file(COPY "${path}" DESTINATION "${PROJECT_BINARY_DIR}/licences/${name}")
  endforeach()
endfunction()

file(GLOB _libraries "${TESSERA_TORCH}/lib/libtorch_cpu.so" "${TESSERA_TORCH}/lib/libc10.so"
  "${TESSERA_TORCH}/lib/libgomp*.so*")
install(FILES ${_libraries} DESTINATION "${CMAKE_INSTALL_LIBDIR}/tessera")

# The licences of all that is inside. scripts/package.sh puts them into the wheel too.
file(REMOVE_RECURSE "${PROJECT_BINARY_DIR}/licences")
tessera_licence(libtorch "${TESSERA_TORCH}/../torch-*.dist-info/licenses/*")
tessera_licence(nlohmann-json "${TESSERA_JSON_INCLUDE}/../../nlohmann_json-*.dist-info/licenses/*"
  /usr/share/doc/nlohmann-json3-dev/copyright)
foreach(_package libpcre2-dev libutf8proc-dev libsodium-dev zlib1g-dev libzstd-dev libcli11-dev libxxhash-dev
    libgomp1)
  tessera_licence(${_package} "/usr/share/doc/${_package}/copyright")
endforeach()
install(DIRECTORY "${PROJECT_BINARY_DIR}/licences" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

file(READ "${PROJECT_SOURCE_DIR}/NOTICE" _notice)
file(WRITE "${PROJECT_BINARY_DIR}/copyright" "${_notice}

On Debian the Apache License is in /usr/share/common-licenses/Apache-2.0. The licences
of the libraries that are linked into the program or lie beside it in
/usr/lib/tessera (LibTorch and its libgomp, unchanged from PyPI's wheel torch
${TESSERA_TORCH_VERSION}) are in /usr/share/doc/tessera/licences.
")
install(FILES "${PROJECT_BINARY_DIR}/copyright" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

string(TOLOWER "${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}" _machine)
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR "Tessera")
set(CPACK_PACKAGE_CONTACT "Tessera's authors <tessera@localhost>")
set(CPACK_PACKAGE_FILE_NAME "tessera-${PROJECT_VERSION}-${_machine}")
set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
set(CPACK_THREADS 0)  # as many as there are cores
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
"A program and a C++ library. The libraries of LibTorch that the program needs are
in /usr/lib/tessera; to build against the library, LibTorch's headers are needed,
which are not in here.")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${TESSERA_TORCH}/lib")
# What the static libraries want from who links with them.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS
  "cmake, g++, libpcre2-dev, libsodium-dev, libutf8proc-dev, libzstd-dev, zlib1g-dev")
include(CPack)
