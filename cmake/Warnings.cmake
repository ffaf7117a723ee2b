# Strict warnings for this project's own targets: they link the interface target
# minference_warnings. Code of others (llama.cpp, headers of packages) is not judged by it.
include_guard(GLOBAL)

add_library(minference_warnings INTERFACE)
target_compile_options(minference_warnings INTERFACE
  -Wall
  -Wextra
  -Wshadow
  -Wnon-virtual-dtor
  -Woverloaded-virtual
  -Wvla
  $<$<BOOL:${MINFERENCE_WERROR}>:-Werror>)
