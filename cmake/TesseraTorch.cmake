# Imports LibTorch as tessera::torch, in this tree and in a consumer's. LibTorch's
# own CMake package refuses to configure for its CUDA build where no CUDA toolkit
# is installed, although linking needs none; so the libraries are linked directly
# here, which serves CPU and CUDA builds alike.
#
# TESSERA_TORCH (variable or environment) names the folder that holds include/
# and lib/: site-packages/torch of a wheel, or an unpacked libtorch archive.
include_guard(GLOBAL)

if(NOT TESSERA_TORCH AND DEFINED ENV{TESSERA_TORCH})
  set(TESSERA_TORCH "$ENV{TESSERA_TORCH}")
endif()
if(NOT TESSERA_TORCH AND TESSERA_TORCH_BUILT_WITH)
  set(TESSERA_TORCH "${TESSERA_TORCH_BUILT_WITH}")
endif()
if(NOT TESSERA_TORCH)
  file(GLOB _tessera_torch_found LIST_DIRECTORIES true
    "${CMAKE_CURRENT_LIST_DIR}/../.venv/lib/python3*/site-packages/torch")
  if(_tessera_torch_found)
    list(GET _tessera_torch_found 0 TESSERA_TORCH)
  endif()
endif()
if(NOT EXISTS "${TESSERA_TORCH}/include/ATen/ATen.h")
  if(NOT TESSERA_TORCH_ADVICE)
    set(TESSERA_TORCH_ADVICE "Run './dev setup', or set TESSERA_TORCH")
  endif()
  message(FATAL_ERROR
    "LibTorch not found (TESSERA_TORCH='${TESSERA_TORCH}'). ${TESSERA_TORCH_ADVICE} "
    "to the folder that holds LibTorch's include/ and lib/.")
endif()
get_filename_component(TESSERA_TORCH "${TESSERA_TORCH}" REALPATH)
set(TESSERA_TORCH "${TESSERA_TORCH}" CACHE PATH
  "LibTorch: the folder with include/ and lib/" FORCE)

file(READ "${TESSERA_TORCH}/include/torch/headeronly/version.h" _tessera_torch_version_h)
string(REGEX REPLACE
  ".*VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*VERSION_PATCH ([0-9]+).*"
  "\\1.\\2.\\3" TESSERA_TORCH_VERSION "${_tessera_torch_version_h}")
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LibTorch 2.11 or later is needed; ${TESSERA_TORCH} holds "
    "${TESSERA_TORCH_VERSION}.")
endif()
if(NOT EXISTS "${TESSERA_TORCH}/include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp")
  message(FATAL_ERROR "The LibTorch in ${TESSERA_TORCH} was built without torch.distributed.")
endif()

# libtorch.so only pulls in the others; name what exists. --no-as-needed keeps
# libtorch_cuda, whose kernels are reached through registration alone.
#
# What is packed (TESSERA_PACKAGE) is linked with what every build of LibTorch has
# and needs no more: libtorch.so of the CUDA build would load all of CUDA. Where it
# finds them is the program's own matter (cli/CMakeLists.txt).
set(_tessera_torch_libraries torch torch_cpu c10 torch_cuda c10_cuda)
set(_tessera_torch_place "-Wl,-rpath,${TESSERA_TORCH}/lib")
if(TESSERA_PACKAGE)
  if(EXISTS "${TESSERA_TORCH}/lib/libtorch_cuda.so")
    message(FATAL_ERROR "${TESSERA_TORCH} is a CUDA build of LibTorch, whose libraries need "
      "CUDA's: a package cannot bring them. Set TESSERA_TORCH to a CPU build.")
  endif()
  set(_tessera_torch_libraries torch_cpu c10)
  set(_tessera_torch_place "-Wl,-rpath-link,${TESSERA_TORCH}/lib")
endif()
# libstdc++ first: LibTorch's libraries export a part of it that they carry, and the
# std::filesystem::remove_all of the CUDA build's libtorch.so ends a program.
set(TESSERA_TORCH_LINK_FLAGS "-Wl,--push-state,--no-as-needed" "-lstdc++")
foreach(_lib IN LISTS _tessera_torch_libraries)
  if(EXISTS "${TESSERA_TORCH}/lib/lib${_lib}.so")
    list(APPEND TESSERA_TORCH_LINK_FLAGS "${TESSERA_TORCH}/lib/lib${_lib}.so")
  endif()
endforeach()
# The runtime of OpenMP that LibTorch brings: another one would have threads of its own.
file(GLOB _tessera_openmp "${TESSERA_TORCH}/lib/libgomp*.so*")
if(NOT _tessera_openmp)
  set(_tessera_openmp "-l:libgomp.so.1")
endif()
list(APPEND TESSERA_TORCH_LINK_FLAGS ${_tessera_openmp} "-Wl,--pop-state" "${_tessera_torch_place}")
# A CUDA wheel's libraries come from its nvidia packages beside torch.
# TESSERA_CUDA_INCLUDE: for the few sources that call CUDA themselves; where there is none it
# is empty, and what they do left out.
set(_tessera_nvidia_dirs "")
set(TESSERA_CUDA_INCLUDE "")
if(EXISTS "${TESSERA_TORCH}/lib/libtorch_cuda.so")
  # A folder with crt/ has what CUDA's own headers include (nvidia-cuda-crt).
  file(GLOB _tessera_crt "${TESSERA_TORCH}/../nvidia/*/include/crt")
  file(GLOB _tessera_toolkit "/usr/local/cuda/include/crt")
  list(APPEND _tessera_crt ${_tessera_toolkit})
  if(_tessera_crt)
    list(GET _tessera_crt 0 _tessera_crt)
    cmake_path(GET _tessera_crt PARENT_PATH TESSERA_CUDA_INCLUDE)
  else()
    message(STATUS "No headers of CUDA beside LibTorch (nvidia-cuda-crt): no graphs of steps, no NCCL")
  endif()
  file(GLOB _tessera_nvidia_dirs LIST_DIRECTORIES true
    "${TESSERA_TORCH}/../nvidia/*/lib" "${TESSERA_TORCH}/../nvidia/*/lib64")
endif()
foreach(_dir IN LISTS _tessera_nvidia_dirs)
  list(APPEND TESSERA_TORCH_LINK_FLAGS "-Wl,-rpath,${_dir}" "-Wl,-rpath-link,${_dir}")
endforeach()

# Imported, so that the exported rooms name it and do not carry it.
add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(tessera::torch INTERFACE
  "${TESSERA_TORCH}/include" "${TESSERA_TORCH}/include/torch/csrc/api/include")
target_compile_features(tessera::torch INTERFACE cxx_std_20)
target_compile_definitions(tessera::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(tessera::torch INTERFACE ${TESSERA_TORCH_LINK_FLAGS})
