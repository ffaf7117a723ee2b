// The measured costs of attention and the file that keeps them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "methods/cost_model.h"

namespace minference::test {
namespace {

namespace fs = std::filesystem;

// A cache folder of its own. Models are kept for the process by their sizes, so that each test takes
// a head_dim that no other takes.
class CostModelFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(::testing::TempDir()) /
        ("minference_costs_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
         ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    setenv("MINFERENCE_CACHE", folder_.c_str(), 1);
  }
  void TearDown() override {
    unsetenv("MINFERENCE_CACHE");
    fs::remove_all(folder_);
  }

  static nlohmann::json read() {
    std::ifstream file(cost_model_path());
    return nlohmann::json::parse(file, nullptr, false);
  }
  static void write(const nlohmann::json& root) {
    fs::create_directories(fs::path(cost_model_path()).parent_path());
    std::ofstream(cost_model_path()) << root.dump();
  }

  fs::path folder_;
};

constexpr IsaLevel kLevel = IsaLevel::kGeneric;

TEST_F(CostModelFile, KeepsWhatWasMeasured) {
  const CostModel model = cost_model(kLevel, 16, 8, 2);
  EXPECT_GT(model.dense_key, 0);
  EXPECT_GE(model.run_key, model.dense_key);
  EXPECT_GE(model.column_key, model.dense_key);
  EXPECT_LT(model.dense(1000), 1);
  const nlohmann::json root = read();
  ASSERT_TRUE(root.is_object());
  EXPECT_EQ(root["models"]["generic/16/8/2"]["dense_key"].get<double>(), model.dense_key);
}

TEST_F(CostModelFile, IsReadInsteadOfMeasuring) {
  cost_model(kLevel, 16, 16, 1);
  nlohmann::json root = read();
  root["models"]["generic/16/24/1"] = {
      {"dense_key", 0.25}, {"run_key", 0.5}, {"column_key", 0.75}, {"row_block", 0.125}};
  write(root);
  const CostModel model = cost_model(kLevel, 16, 24, 1);
  EXPECT_EQ(model.dense(2), 0.5);
  EXPECT_EQ(model.sparse(2, 4), 0.125 + 1.0 + 3.0);
}

TEST_F(CostModelFile, OfAnotherKindIsMeasuredAnew) {
  std::int64_t dim = 32;
  const nlohmann::json wrong = {
      {"dense_key", 0.25}, {"run_key", 0.5}, {"column_key", 0.75}, {"row_block", 0.125}};
  for (const auto& [what, value] : {std::pair<const char*, nlohmann::json>{"version", 99},
                                    {"processor", "another"},
                                    {"models", "none"}}) {
    const std::string key = "generic/" + std::to_string(dim) + "/8/1";
    nlohmann::json root = {{"version", 1}, {"processor", "x"}, {"models", {{key, wrong}}}};
    root[what] = value;
    write(root);
    EXPECT_LT(cost_model(kLevel, dim, 8, 1).dense_key, 0.01) << what;
    EXPECT_TRUE(read()["models"].contains(key)) << what;
    dim += 16;
  }
  fs::create_directories(folder_);
  std::ofstream(cost_model_path()) << "{ not json";
  EXPECT_LT(cost_model(kLevel, dim, 8, 1).dense_key, 0.01);
  EXPECT_TRUE(read().is_object());
}

TEST_F(CostModelFile, IsDoneWithoutWhereItCannotBe) {
  fs::create_directories(folder_.parent_path());
  std::ofstream(folder_) << "a file where the folder should be";
  EXPECT_GT(cost_model(kLevel, 16, 40, 1).dense_key, 0);
}

}  // namespace
}  // namespace minference::test
