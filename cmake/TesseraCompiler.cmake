# The compiler and what is set around it: C++20, ccache, mold, sanitizers.
include_guard(GLOBAL)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "g++ 12 or later is needed; ${CMAKE_CXX_COMPILER} is "
    "${CMAKE_CXX_COMPILER_VERSION}. Set CXX to a newer one.")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# A static library need not wait for those it is linked with later.
set(CMAKE_OPTIMIZE_DEPENDENCIES ON)

# LibTorch's place is given to the linker as it is (TesseraTorch.cmake). What
# CMake would add leaves an empty entry when it is installed, and that is the
# folder in which a program is started.
set(CMAKE_SKIP_RPATH ON)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  # Where a checkout lies is no part of what is built, nor of what ccache knows.
  add_compile_options("-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
  # With a precompiled header ccache must not look at macros and times in it.
  find_program(TESSERA_CCACHE ccache)
  if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
      "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime,file_stat_matches
      "${TESSERA_CCACHE}")
  endif()
  find_program(TESSERA_MOLD mold)
  if(TESSERA_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
endif()
