# Run by cmake --install: the man page and completions, by the program itself.
# Given: tessera, torch_libraries (where it may have to look), man_folder, zsh_folder.
set(tessera_path "${torch_libraries}")
if(DEFINED ENV{LD_LIBRARY_PATH})
  string(APPEND tessera_path ":$ENV{LD_LIBRARY_PATH}")
endif()
macro(tessera_page folder name)
  set(page "${CMAKE_INSTALL_PREFIX}/${folder}/${name}")
  message(STATUS "Installing: ${page}")
  file(MAKE_DIRECTORY "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/${folder}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${tessera_path}" "${tessera}" ${ARGN}
    OUTPUT_FILE "$ENV{DESTDIR}${page}" COMMAND_ERROR_IS_FATAL ANY)
  list(APPEND CMAKE_INSTALL_MANIFEST_FILES "${page}")
endmacro()

tessera_page("${man_folder}" tessera.1 schema --man)
find_program(gzip gzip)
if(gzip)
  execute_process(COMMAND "${gzip}" -9nf "$ENV{DESTDIR}${page}" COMMAND_ERROR_IS_FATAL ANY)
  list(TRANSFORM CMAKE_INSTALL_MANIFEST_FILES REPLACE "/tessera\\.1$" "/tessera.1.gz")
endif()
tessera_page(share/bash-completion/completions tessera completion bash)
tessera_page(share/fish/vendor_completions.d tessera.fish completion fish)
tessera_page("${zsh_folder}" _tessera completion zsh)
