# The Python that the extension module is built for: that of LibTorch's wheel,
# or what TESSERA_PYTHON_EXECUTABLE names. Sets TESSERA_PYTHON_INCLUDE and
# TESSERA_PYTHON_SUFFIX; TESSERA_PYTHON_LACKS says what is missing, if anything.
include_guard(GLOBAL)

if(NOT TESSERA_PYTHON_EXECUTABLE)
  # <prefix>/lib/python3.X/site-packages/torch
  get_filename_component(_prefix "${TESSERA_TORCH}/../../../.." ABSOLUTE)
  set(TESSERA_PYTHON_EXECUTABLE "${_prefix}/bin/python3")
endif()
set(TESSERA_PYTHON_LACKS "")
if(NOT EXISTS "${TESSERA_TORCH}/lib/libtorch_python.so")
  set(TESSERA_PYTHON_LACKS "${TESSERA_TORCH} has no lib/libtorch_python.so")
elseif(NOT EXISTS "${TESSERA_PYTHON_EXECUTABLE}")
  set(TESSERA_PYTHON_LACKS "there is no ${TESSERA_PYTHON_EXECUTABLE}")
else()
  execute_process(COMMAND "${TESSERA_PYTHON_EXECUTABLE}" -c
    "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';', end='')"
    OUTPUT_VARIABLE _python COMMAND_ERROR_IS_FATAL ANY)
  list(GET _python 0 TESSERA_PYTHON_INCLUDE)
  list(GET _python 1 TESSERA_PYTHON_SUFFIX)
  if(NOT EXISTS "${TESSERA_PYTHON_INCLUDE}/Python.h")
    set(TESSERA_PYTHON_LACKS "${TESSERA_PYTHON_INCLUDE} has no Python.h (Debian: python3-dev)")
  endif()
endif()
