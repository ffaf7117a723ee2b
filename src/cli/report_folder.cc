#include "cli/report_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "minference/error.h"

namespace minference::cli {
namespace {

namespace fs = std::filesystem;

void check(const std::string& path, const std::error_code& error) {
  if (error) throw IoError(path + ": " + error.message());
}

// "report/" and "report/." are the folder report: its partial files belong beside it.
fs::path without_trailing_slash(const std::string& path) {
  fs::path folder = fs::path(path).lexically_normal();
  return folder.has_filename() || !folder.has_parent_path() ? folder : folder.parent_path();
}

}  // namespace

ReportFolder::ReportFolder(const std::string& path, bool force)
    : path_(path), folder_(without_trailing_slash(path)) {
  if (path.empty()) throw InvalidArgument("the name of the output folder is empty");
  std::error_code error;
  const fs::file_status status = fs::status(folder_, error);
  existed_ = fs::exists(status);
  if (existed_ && !fs::is_directory(status)) throw IoError(path + ": is not a folder");
  if (!existed_ && status.type() != fs::file_type::not_found) check(path, error);
  if (existed_) {
    const bool empty = fs::is_empty(folder_, error);
    check(path, error);
    if (!empty && !force) {
      throw InvalidArgument(path + " is not empty; --force writes the report into it");
    }
  }
  const std::string suffix = ".partial-" + std::to_string(getpid());
  const fs::path partial = existed_ ? folder_ / suffix : fs::path(folder_.string() + suffix);
  fs::create_directory(partial, error);
  check(path, error);
  partial_ = partial;
}

ReportFolder::~ReportFolder() {
  std::error_code ignored;
  if (!partial_.empty()) fs::remove_all(partial_, ignored);
}

void ReportFolder::write(const std::string& name, std::string_view content) {
  const fs::path path = partial_ / name;
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) throw IoError((fs::path(path_) / name).string() + ": " + std::strerror(errno));
  names_.push_back(name);
}

void ReportFolder::publish(bool (*stale)(const std::string& name)) {
  std::error_code error;
  if (!existed_) {
    fs::rename(partial_, folder_, error);
    check(path_, error);
    partial_.clear();
    return;
  }
  std::vector<fs::path> old;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    if (stale(name) && std::find(names_.begin(), names_.end(), name) == names_.end()) {
      old.push_back(entry.path());
    }
  }
  check(path_, error);
  for (const std::string& name : names_) {
    fs::rename(partial_ / name, folder_ / name, error);
    check((folder_ / name).string(), error);
  }
  for (const fs::path& path : old) {
    fs::remove(path, error);
    check(path.string(), error);
  }
}

}  // namespace minference::cli
