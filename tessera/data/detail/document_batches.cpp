#include "tessera/data/detail/document_batches.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/data/detail/sections.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kBatchFiles = 256;  // mapped at the same time

}  // namespace

DocumentBatches::DocumentBatches(std::vector<std::string> paths,
                                 DocumentForm form, SectionEnds ends,
                                 size_t batch_bytes)
    : paths_(std::move(paths)),
      form_(std::move(form)),
      ends_(ends),
      batch_bytes_(batch_bytes) {
  for (const std::string& path : paths_) {
    total_ += std::filesystem::file_size(path);
  }
}

bool DocumentBatches::next() {
  parts_.clear();
  size_ = 0;
  let_go();
  take(/*begins=*/false);
  while (size_ < batch_bytes_ && open_.size() < kBatchFiles &&
         read_document()) {
    take(/*begins=*/true);
  }
  return !parts_.empty();
}

// What is left of a document is of the newest: nothing points into the others.
void DocumentBatches::let_go() {
  const size_t kept = rest_.empty() ? 0 : 1;
  while (texts_.size() > kept) texts_.pop_front();
  while (open_.size() > 1) open_.pop_front();
}

size_t DocumentBatches::held_bytes() const {
  size_t bytes = 0;
  for (const std::string& text : texts_) bytes += text.size();
  return bytes;
}

// Of this file, or of those behind it. REQUIRES: nothing of the last one is
// left.
bool DocumentBatches::read_document() {
  for (;;) {
    const auto text = open_.empty() ? std::nullopt : open_.back().next();
    if (text) {
      ++num_documents_;
      rest_ = open_.back().stays() ? *text : texts_.emplace_back(*text);
      return true;
    }
    if (next_file_ == paths_.size()) return false;
    if (!open_.empty()) of_files_before_ += open_.back().consumed();
    open_.emplace_back(paths_[next_file_++], form_);
  }
}

// As much of the rest as the batch has room for, in whole sections.
void DocumentBatches::take(bool begins) {
  if (rest_.empty() && !begins) return;
  size_t size = rest_.size();
  if (size > batch_bytes_ - size_) {
    size = end_of_section(rest_, batch_bytes_ - size_, ends_);
  }
  parts_.push_back({rest_.substr(0, size), begins});
  rest_.remove_prefix(size);
  size_ += size;
}

uint64_t DocumentBatches::consumed() const {
  const uint64_t here = open_.empty() ? 0 : open_.back().consumed();
  return of_files_before_ + here - std::min<uint64_t>(here, rest_.size());
}

void DocumentBatches::tell(Progress& progress,
                           const std::function<std::string()>& more) const {
  progress.tell(static_cast<double>(consumed()), static_cast<double>(total_),
                [&] {
                  return c10::str(bytes_text(consumed()), " of ",
                                  bytes_text(total_), ", ", more());
                });
}

}  // namespace tessera::data::detail
