// Numbers for messages and environment variables.
#pragma once

#include <string>

namespace minference {

// The shortest text that reads back as `value`: 64, 0.5, 1000001, 1e-07, nan. Not by a stream or printf:
// those follow the program's locale, and in a process with several C++ runtimes (libraries of Python
// packages bring their own) a stream can meet another one's number formats and crash.
std::string format_number(double value);

}  // namespace minference
