# Looks for MPI, which the backend mpi is built on. Any MPI whose compiler
# wrapper CMake finds: MPI_CXX_COMPILER (mpicxx.mpich, ...) names another.
#
# Sets TESSERA_HAS_MPI (yes or no), TESSERA_MPI_LIBRARIES (as the linker is given
# them), TESSERA_MPI_INCLUDES, MPIEXEC_EXECUTABLE and TESSERA_MPIEXEC_ENVIRONMENT
# (for tests: as root too, more ranks than cores; of Open MPI 4, and 5; and, of
# 4, not at odds with a rank that has ended MPI while mpirun was too busy to hear
# of it for 2 s: what leaves MPI out at its end says so itself, "MPI was not ended").
include_guard(GLOBAL)

set(TESSERA_MPI AUTO CACHE STRING
  "Build the backend mpi: AUTO (where MPI is found), ON or OFF")
set_property(CACHE TESSERA_MPI PROPERTY STRINGS AUTO ON OFF)

set(TESSERA_MPIEXEC_ENVIRONMENT
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_orte_allowed_exit_without_sync=1
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe)

set(TESSERA_HAS_MPI no)
if(TESSERA_MPI)
  # The C interface alone is used, and C need not be enabled for it.
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(TESSERA_HAS_MPI yes)
    set(TESSERA_MPI_INCLUDES ${MPI_CXX_INCLUDE_DIRS})
    set(TESSERA_MPI_LIBRARIES ${MPI_CXX_LIBRARIES})
    list(FILTER TESSERA_MPI_LIBRARIES EXCLUDE REGEX "lib(mpi_cxx|mpicxx|mpichcxx)\\.")
    # Where a wrapper says how its libraries are found when a program starts.
    separate_arguments(flags UNIX_COMMAND "${MPI_CXX_LINK_FLAGS}")
    list(FILTER flags INCLUDE REGEX "-rpath|^-Wl,/")
    list(APPEND TESSERA_MPI_LIBRARIES ${flags})
  elseif(TESSERA_MPI STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_MPI=ON, but no MPI was found. Install "
      "libopenmpi-dev and openmpi-bin, or set MPI_CXX_COMPILER to the mpicxx of yours.")
  endif()
endif()
message(STATUS "Backend mpi: ${TESSERA_HAS_MPI} (${TESSERA_MPI}) ${TESSERA_MPI_LIBRARIES}")

# Picks the backend or its stub; what is not picked is not compiled.
function(tessera_mpi_sources)
  set(folder "${PROJECT_SOURCE_DIR}/tessera/comm/mpi")
  set(callers "${folder}/calls.cpp" "${folder}/check.cpp" "${folder}/life.cpp")
  set(backend ${callers} "${folder}/mpi_backend.cpp" "${folder}/progress.cpp"
    "${folder}/reducible.cpp")
  if(TESSERA_HAS_MPI)
    set_property(SOURCE "${folder}/no_mpi.cpp" PROPERTY HEADER_FILE_ONLY ON)
    # MPI's header is seen by these alone, and without its C++ classes.
    set_property(SOURCE ${callers} PROPERTY
      INCLUDE_DIRECTORIES ${TESSERA_MPI_INCLUDES})
    set_property(SOURCE ${callers} PROPERTY
      COMPILE_DEFINITIONS OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  else()
    set_property(SOURCE ${backend} PROPERTY HEADER_FILE_ONLY ON)
  endif()
endfunction()
