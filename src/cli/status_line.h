// One line on a terminal's stderr that is overwritten; silent when stderr is something else.
#pragma once

#include <string>

namespace minference::cli {

class StatusLine {
 public:
  StatusLine();
  // Removes the line.
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // Whether somebody sees it; what makes the text can be left out otherwise.
  bool visible() const { return terminal_; }
  void show(const std::string& text);
  // Before something else is written to the terminal.
  void clear();

 private:
  bool terminal_;
};

}  // namespace minference::cli
