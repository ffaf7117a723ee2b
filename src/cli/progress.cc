#include "cli/progress.h"

#include <cstdio>

namespace minference::cli {

Progress::Progress(std::int64_t total, const char* label) : total_(total), label_(label) {
  update(0, std::nullopt);
}

void Progress::update(std::int64_t done, std::optional<double> kept_fraction) {
  if (!line_.visible()) return;
  const double seconds = watch_.seconds();
  constexpr std::int64_t kWidth = 24;
  const std::int64_t filled = total_ > 0 ? kWidth * done / total_ : 0;
  std::string line = std::string(label_) + " [" +
                     std::string(static_cast<std::size_t>(filled), '#') +
                     std::string(static_cast<std::size_t>(kWidth - filled), '.') + "] " +
                     std::to_string(done) + "/" + std::to_string(total_) + " tokens";
  if (done > 0 && seconds > 0) {
    const double rate = static_cast<double>(done) / seconds;
    char text[96];
    // Attention makes later tokens dearer; the estimate ignores that and is a little short.
    std::snprintf(text, sizeof(text), ", %.0f tokens/s, %.0f s left", rate,
                  static_cast<double>(total_ - done) / rate);
    line += text;
  }
  if (kept_fraction) {
    char text[32];
    std::snprintf(text, sizeof(text), ", %.1f %% kept", 100.0 * *kept_fraction);
    line += text;
  }
  line_.show(line);
}

}  // namespace minference::cli
