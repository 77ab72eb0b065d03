# Looks for what the backend nccl is built with: LibTorch's own NCCL, in a CUDA
# build of it, and the headers that its declaration includes, of the packages
# that come with its wheel or of a CUDA toolkit. What is linked is LibTorch's, and
# the runtime of CUDA that it brings.
#
# Sets TESSERA_HAS_NCCL (yes or no) and TESSERA_NCCL_LIBRARIES.
include_guard(GLOBAL)

set(TESSERA_HAS_NCCL no)
set(TESSERA_NCCL_LIBRARIES "")
if(EXISTS "${TESSERA_TORCH}/lib/libtorch_cuda.so")
  file(GLOB _nvidia_includes LIST_DIRECTORIES true "${TESSERA_TORCH}/../nvidia/*/include")
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${_nvidia_includes})
  file(GLOB _cudart "${TESSERA_TORCH}/../nvidia/*/lib/libcudart.so.*"
    "${TESSERA_TORCH}/lib/libcudart*.so*")
  if(TESSERA_NCCL_INCLUDE AND TESSERA_CUDA_INCLUDE AND _cudart)
    set(TESSERA_HAS_NCCL yes)
    list(GET _cudart 0 TESSERA_NCCL_LIBRARIES)
  endif()
endif()
message(STATUS "Backend nccl: ${TESSERA_HAS_NCCL} ${TESSERA_NCCL_INCLUDE} ${TESSERA_CUDA_INCLUDE}")

# Picks the backend or its stub; what is not picked is not compiled.
function(tessera_nccl_sources)
  set(folder "${PROJECT_SOURCE_DIR}/tessera/comm/nccl")
  if(NOT TESSERA_HAS_NCCL)
    set_property(SOURCE "${folder}/nccl_backend.cpp" PROPERTY HEADER_FILE_ONLY ON)
    return()
  endif()
  set_property(SOURCE "${folder}/no_nccl.cpp" PROPERTY HEADER_FILE_ONLY ON)
  # Seen by this source alone. A wheel lacks some: see comm/nccl/stubs/README.md.
  set(includes "-isystem${TESSERA_CUDA_INCLUDE}" "-isystem${TESSERA_NCCL_INCLUDE}")
  if(NOT EXISTS "${TESSERA_CUDA_INCLUDE}/nv/target")
    list(PREPEND includes "-isystem${folder}/stubs")
  endif()
  set_source_files_properties("${folder}/nccl_backend.cpp" PROPERTIES
    COMPILE_DEFINITIONS USE_C10D_NCCL COMPILE_OPTIONS "${includes}"
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()
