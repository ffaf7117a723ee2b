// Exception types: what a caller can cause, what cannot be done, what the file system refused.
#pragma once

#include <stdexcept>
#include <string>

namespace minference {

// Base of every exception that the library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something illegal; the message names the value and the legal range.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The request is legal but this build, device or method cannot serve it; the message says what can.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// A file could not be read, parsed or written; the message names the path and the reason.
class IoError : public Error {
 public:
  using Error::Error;
};

}  // namespace minference
