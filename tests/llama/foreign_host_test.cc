// The plug-in inside a host with another ggml, or with none: it refuses with one sentence, and the
// process lives on. This program exports functions of ggml's names and is such a host itself.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support/process.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Only ggml_version() may be called before the plug-in refuses.
EXPORT const char* ggml_version() { return "0.9.1"; }
EXPORT void ggml_backend_cpu_buffer_type() { std::abort(); }
EXPORT void ggml_backend_cpu_buffer_from_ptr() { std::abort(); }
EXPORT void ggml_backend_buft_is_host() { std::abort(); }
EXPORT void ggml_graph_n_nodes() { std::abort(); }
EXPORT void ggml_graph_node() { std::abort(); }
EXPORT void ggml_backend_reg_by_name() { std::abort(); }
EXPORT void ggml_backend_register() { std::abort(); }

namespace minference::testing {
namespace {

constexpr char kPlugin[] = MINFERENCE_TEST_BIN_DIR "/libggml-minference.so";

TEST(ForeignHost, AnotherVersionOfGgmlIsRefused) {
  void* plugin = dlopen(kPlugin, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(plugin, nullptr) << dlerror();
  const auto init = reinterpret_cast<void* (*)()>(dlsym(plugin, "ggml_backend_init"));
  ASSERT_NE(init, nullptr);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(init(), nullptr);
  const std::string message = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(message.find("minference: error: "), 0U) << message;
  EXPECT_NE(message.find("0.9.1"), std::string::npos) << message;
  EXPECT_NE(message.find(MINFERENCE_GGML_VERSION), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), message.size() - 1) << message;
  dlclose(plugin);
}

TEST(ForeignHost, ProgramWithoutGgmlDoesNotNotice) {
  const ProcessResult result =
      run_process({"echo", "hello"}, {.environment = {{"LD_PRELOAD", kPlugin}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "hello\n");
  EXPECT_EQ(result.err, "");
}

}  // namespace
}  // namespace minference::testing
