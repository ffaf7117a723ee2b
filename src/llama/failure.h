// Exceptions of the llama.cpp host beyond those of the library.
#pragma once

#include "minference/error.h"

namespace minference::llama_host {

// llama.cpp failed although the request was legal.
class RuntimeFailure : public Error {
 public:
  using Error::Error;
};

// The caller's stop flag was seen.
class Interrupted : public Error {
 public:
  using Error::Error;
};

}  // namespace minference::llama_host
