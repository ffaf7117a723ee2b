#include "cli/cell_process.h"

#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "cli/exit_codes.h"
#include "llama/failure.h"

namespace minference::cli {
namespace {

using llama_host::RuntimeFailure;

// A file without a name stands in for a pipe: it never fills, and nothing is left of it.
class Scratch {
 public:
  Scratch() : file_(std::tmpfile()) {
    if (file_ == nullptr) throw_errno("no temporary file");
  }

  int descriptor() const { return fileno(file_.get()); }
  void write(const std::string& text) {
    if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
        std::fflush(file_.get()) != 0) {
      throw_errno("a temporary file cannot be written");
    }
    std::rewind(file_.get());
  }
  std::string read() {
    std::rewind(file_.get());
    std::string text;
    std::array<char, 4096> part;
    while (const std::size_t count = std::fread(part.data(), 1, part.size(), file_.get())) {
      text.append(part.data(), count);
    }
    return text;
  }

 private:
  [[noreturn]] static void throw_errno(const std::string& what) {
    throw RuntimeFailure(what + ": " + std::strerror(errno));
  }

  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Closer> file_;
};

pid_t start(const std::vector<std::string>& arguments, const Scratch& in, const Scratch& out,
            const Scratch& err) {
  std::vector<std::string> words = {"minference"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.descriptor(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out.descriptor(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.descriptor(), STDERR_FILENO);
  pid_t child = 0;
  // The link, not the path behind it: a rebuild during the bench must not change what is measured.
  const int error = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw RuntimeFailure(std::string("cannot start a process: ") + std::strerror(error));
  }
  return child;
}

}  // namespace

CellResult run_cell(const std::vector<std::string>& arguments, const std::string& input,
                    const std::atomic<bool>& stop, const std::function<void()>& wait) {
  constexpr auto kPoll = std::chrono::milliseconds(50);
  Scratch in;
  Scratch out;
  Scratch err;
  in.write(input);
  const pid_t child = start(arguments, in, out, err);
  int status = 0;
  rusage usage{};
  bool asked = false;
  // Polled, because a signal between a test of `stop` and a wait that blocks would be lost.
  for (;;) {
    const pid_t ended = wait4(child, &status, WNOHANG, &usage);
    if (ended == child) break;
    if (ended < 0 && errno != EINTR) {
      throw RuntimeFailure(std::string("cannot wait for a process: ") + std::strerror(errno));
    }
    if (stop && !asked) {
      kill(child, SIGINT);
      asked = true;
    }
    wait();
    std::this_thread::sleep_for(kPoll);
  }
  CellResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  // A terminal's Ctrl-C reaches the child as well, perhaps before this process.
  if (stop || result.exit_code == kInterrupted) throw llama_host::Interrupted("interrupted");
  result.out = out.read();
  result.err = err.read();
  result.peak_mib = static_cast<double>(usage.ru_maxrss) / 1024.0;
  return result;
}

}  // namespace minference::cli
