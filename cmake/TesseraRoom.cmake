# tessera_room(NAME [DEPENDS ROOM...] [LINK LIBRARY...]): one static library
# tessera_NAME of all sources in tessera/NAME, and one test program NAME_test of
# all *_test.cpp there (files named *_slow_test.cpp go into NAME_slow_test,
# label slow). LINK names system libraries that the room's sources use.
include_guard(GLOBAL)
find_package(Threads REQUIRED)

set(TESSERA_ROOMS "" CACHE INTERNAL "")
set(TESSERA_SYSTEM_LIBRARIES "" CACHE INTERNAL "")

# tessera/core/version.h carries what was built, against which LibTorch.
set(TESSERA_GENERATED "${PROJECT_BINARY_DIR}/generated")
configure_file("${PROJECT_SOURCE_DIR}/cmake/version.h.in"
  "${TESSERA_GENERATED}/tessera/core/version.h" @ONLY)

# What every room brings to those who link it.
add_library(tessera_options INTERFACE)
target_include_directories(tessera_options INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>"
  "$<BUILD_INTERFACE:${TESSERA_GENERATED}>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_link_libraries(tessera_options INTERFACE tessera::torch Threads::Threads)
set_target_properties(tessera_options PROPERTIES EXPORT_NAME options)

# What this tree alone compiles with: warnings, and nlohmann/json, which stays
# inside .cpp files. Never a consumer's.
add_library(tessera_private INTERFACE)
# Not those warnings that g++ 12 has of the standard library and of its own
# headers of vectors, nor of members that a designated initialiser leaves to
# their defaults, nor of what is a header's fault alone: sources are included too.
target_compile_options(tessera_private INTERFACE
  -fPIC -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
  -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds -Wno-restrict
  -Wno-maybe-uninitialized -Wno-subobject-linkage -Werror=return-type
  -Werror=unused-result)
if(TESSERA_WERROR)
  target_compile_options(tessera_private INTERFACE -Werror)
endif()

# 3.12 or later, for the positions in its diagnostics: from the wheel that
# ./dev setup fetches, or from the system.
file(GLOB _tessera_json_dirs LIST_DIRECTORIES true
  "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nlohmann_json/include")
find_path(TESSERA_JSON_INCLUDE nlohmann/json.hpp HINTS ${_tessera_json_dirs})
if(NOT TESSERA_JSON_INCLUDE)
  message(FATAL_ERROR "nlohmann/json.hpp not found. Run './dev setup', or set "
    "TESSERA_JSON_INCLUDE to the folder that holds nlohmann/ (3.12 or later).")
endif()
target_include_directories(tessera_private SYSTEM INTERFACE "${TESSERA_JSON_INCLUDE}")

# Parsing LibTorch's headers costs more than compiling our code: every target
# reuses one of two precompiled headers, which hold what most sources include. A
# program is compiled like a library (-fPIC, not -fPIE): the compiler silently
# passes over a precompiled header that was made with the other.
foreach(pch pch pch_modules)
  add_library(tessera_${pch} STATIC "${PROJECT_SOURCE_DIR}/cmake/pch.cpp")
  target_link_libraries(tessera_${pch} PUBLIC tessera_options PRIVATE tessera_private)
  target_precompile_headers(tessera_${pch} PRIVATE "${PROJECT_SOURCE_DIR}/cmake/${pch}.h")
  set_target_properties(tessera_${pch} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
endforeach()

# Compile settings that every target of this tree shares. MODULES: its sources
# include torch::nn's modules.
function(tessera_target target)
  cmake_parse_arguments(TARGET "MODULES" "" "" ${ARGN})
  set(pch tessera_pch)
  if(TARGET_MODULES)
    set(pch tessera_pch_modules)
  endif()
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:tessera_private>)
  target_precompile_headers(${target} REUSE_FROM ${pch})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  tessera_unity(${target})
endfunction()

# Compiles several sources of a target as one: a third of the time. Those of
# which one uses a name that the other has of its own are kept apart, so that
# each means what it says.
# Without Python each source is compiled by itself.
find_program(TESSERA_PYTHON3 python3)
function(tessera_unity target)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources EXCLUDE REGEX "[$]<")
  list(REMOVE_ITEM sources "" ${TESSERA_MUTATED})
  list(LENGTH sources count)
  if(count LESS 2 OR NOT TESSERA_PYTHON3)
    return()
  endif()
  set(script "${PROJECT_SOURCE_DIR}/cmake/unity_groups.py")
  execute_process(COMMAND "${TESSERA_PYTHON3}" "${script}" ${sources}
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" OUTPUT_VARIABLE groups COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${script}")
  string(REGEX MATCHALL "[^\n]+" groups "${groups}")
  foreach(line IN LISTS groups)
    string(REGEX MATCH "^([0-9]+) (.*)$" line "${line}")
    set_source_files_properties("${CMAKE_MATCH_2}" PROPERTIES UNITY_GROUP "${target}_${CMAKE_MATCH_1}")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

function(tessera_room name)
  cmake_parse_arguments(ROOM "MODULES" "" "DEPENDS;LINK" ${ARGN})
  set(modules "")
  if(ROOM_MODULES)
    set(modules MODULES)
  endif()
  # What is packed brings small libraries with it, and needs nothing installed.
  if(TESSERA_PACKAGE)
    list(TRANSFORM ROOM_LINK REPLACE "^([^-/].*)$" "-l:lib\\1.a")
  endif()
  set(dir "${PROJECT_SOURCE_DIR}/tessera/${name}")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${dir}/*.cpp")
  set(tests ${sources})
  set(slow_tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER tests EXCLUDE REGEX "_slow_test\\.cpp$")
  list(FILTER slow_tests INCLUDE REGEX "_slow_test\\.cpp$")

  set(target tessera_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    tessera_target(${target} ${modules})
    target_link_libraries(${target} PRIVATE ${ROOM_LINK})
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_link_libraries(${target} ${scope} tessera_options)
  foreach(room IN LISTS ROOM_DEPENDS)
    target_link_libraries(${target} ${scope} tessera_${room})
  endforeach()
  add_library(tessera::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  set(TESSERA_ROOMS ${TESSERA_ROOMS} ${name} CACHE INTERNAL "")
  set(TESSERA_SYSTEM_LIBRARIES ${TESSERA_SYSTEM_LIBRARIES} ${ROOM_LINK}
    CACHE INTERNAL "")

  tessera_room_tests(${name}_test ${target} "${modules}" ${tests})
  tessera_room_tests(${name}_slow_test ${target} "${modules}" ${slow_tests})
endfunction()

# Notes a test program; tests/CMakeLists.txt builds it.
function(tessera_room_tests program room modules)
  if(TESSERA_TESTS AND ARGN)
    set_property(GLOBAL APPEND PROPERTY TESSERA_TEST_PROGRAMS ${program})
    set_property(GLOBAL PROPERTY TESSERA_SOURCES_OF_${program} ${ARGN})
    set_property(GLOBAL PROPERTY TESSERA_ROOM_OF_${program} ${room})
    set_property(GLOBAL PROPERTY TESSERA_MODULES_OF_${program} ${modules})
  endif()
endfunction()

# The sources of a folder below tessera/, each for a set of vectors.
function(tessera_vectors folder)
  set(avx2_flags -mavx2 -mf16c -mfma -mprfchw)
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  set(avx512_bf16_flags ${avx512_flags} -mavx512bf16)
  foreach(vectors IN ITEMS baseline avx2 avx512 avx512_bf16)
    set(flags -O3 ${ARGN})
    if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
      list(APPEND flags ${${vectors}_flags})
    endif()
    set_source_files_properties("${PROJECT_SOURCE_DIR}/tessera/${folder}/${vectors}.cpp"
      PROPERTIES COMPILE_OPTIONS "${flags}" SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endfunction()
