// ReportFolder: an output folder that gets all of its files at the end, or none.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace minference::cli {

class ReportFolder {
 public:
  // Checks that files can be written there, before anything costly is done: files are collected in
  // a folder beside a new folder, inside an existing one. Throws IoError naming path and reason, and
  // InvalidArgument when the folder is not empty and `force` is not set.
  ReportFolder(const std::string& path, bool force);
  // Removes what was not published.
  ~ReportFolder();
  ReportFolder(const ReportFolder&) = delete;
  ReportFolder& operator=(const ReportFolder&) = delete;

  // `name` without folder. Throws IoError.
  void write(const std::string& name, std::string_view content);

  // Puts the files in place, the last written one last. Files of the same names are replaced, and
  // those that `stale` says are of an earlier report removed; others stay. Throws IoError.
  void publish(bool (*stale)(const std::string& name));

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::filesystem::path folder_;
  std::filesystem::path partial_;
  std::vector<std::string> names_;
  bool existed_ = false;
};

}  // namespace minference::cli
