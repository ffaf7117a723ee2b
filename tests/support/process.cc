#include "support/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace minference::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Pipe {
  int read_end = -1;
  int write_end = -1;

  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  void close_read() { close_one(read_end); }
  void close_write() { close_one(write_end); }

 private:
  static void close_one(int& end) {
    if (end >= 0) close(end);
    end = -1;
  }
};

[[noreturn]] void run_child(const std::vector<std::string>& arguments,
                            const ProcessOptions& options, const Pipe& in, const Pipe& out,
                            const Pipe& err) {
  dup2(in.read_end, STDIN_FILENO);
  if (options.output_path.empty()) {
    dup2(out.write_end, STDOUT_FILENO);
  } else {
    dup2(open(options.output_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), STDOUT_FILENO);
  }
  dup2(err.write_end, STDERR_FILENO);
  for (const auto& [name, value] : options.environment) {
    if (value.empty()) {
      unsetenv(name.c_str());
    } else {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  std::perror(argv[0]);
  _exit(127);
}

// Reads what is there; false at the end of the stream.
bool drain(int descriptor, std::string& text) {
  std::array<char, 65536> buffer;
  const ssize_t count = read(descriptor, buffer.data(), buffer.size());
  if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
  return count > 0;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& arguments,
                          const ProcessOptions& options) {
  Pipe in;
  Pipe out;
  Pipe err;
  signal(SIGPIPE, SIG_IGN);
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) run_child(arguments, options, in, out, err);
  in.close_read();
  out.close_write();
  err.close_write();

  ProcessResult result;
  std::size_t written = 0;
  if (options.input.empty()) in.close_write();
  bool out_open = true;
  bool err_open = true;
  bool interrupted = options.interrupt_after_seconds <= 0;
  while (out_open || err_open) {
    std::array<pollfd, 3> events{{{out_open ? out.read_end : -1, POLLIN, 0},
                                  {err_open ? err.read_end : -1, POLLIN, 0},
                                  {in.write_end, POLLOUT, 0}}};
    poll(events.data(), events.size(), 20);
    if (events[0].revents != 0) out_open = drain(out.read_end, result.out);
    if (events[1].revents != 0) err_open = drain(err.read_end, result.err);
    if (events[2].revents != 0) {
      const ssize_t count = write(in.write_end, options.input.data() + written,
                                  std::min<std::size_t>(options.input.size() - written, 4096));
      if (count > 0) written += static_cast<std::size_t>(count);
      if (count <= 0 || written == options.input.size()) in.close_write();
    }
    if (!interrupted && seconds_since(start) > options.interrupt_after_seconds) {
      kill(child, SIGINT);
      interrupted = true;
    }
    if (seconds_since(start) > options.timeout_seconds) {
      kill(child, SIGKILL);
      result.timed_out = true;
      break;
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.seconds = seconds_since(start);
  return result;
}

std::string temporary_file(const std::string& name, const std::string& content) {
  namespace fs = std::filesystem;
  static const struct Folder {
    fs::path path = fs::temp_directory_path() / ("minference-test-" + std::to_string(getpid()));
    Folder() { fs::create_directories(path); }
    ~Folder() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  } folder;
  const fs::path path = folder.path / name;
  std::ofstream(path, std::ios::binary) << content;
  return path.string();
}

}  // namespace minference::testing
