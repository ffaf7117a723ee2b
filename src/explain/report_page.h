// The skeleton of an `explain` report: its style and the words that do not depend on figures.
#pragma once

namespace minference::explain {

// For fill_template(): the page, and what stands above the heads in detail.
extern const char* const kReportPage;
extern const char* const kReportHeads;

}  // namespace minference::explain
