#include "tessera/data/detail/tokenize_documents.h"

#include <algorithm>
#include <chrono>

#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/data/detail/document_batches.h"

namespace tessera::data::detail {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Progress {
 public:
  void tell(const DocumentBatches& batches, int64_t tokens) {
    constexpr double kBetweenLines = 5;
    const auto done = static_cast<double>(batches.consumed());
    const auto total = static_cast<double>(batches.total());
    if (done <= 0 || seconds_since(told_) < kBetweenLines) return;
    told_ = Clock::now();
    const double left = seconds_since(start_) * (total - done) / done;
    log::info("tokenizing: ", bytes_text(batches.consumed()), " of ",
              bytes_text(batches.total()), " (",
              static_cast<int>(100 * done / total), "%), ",
              count_text(static_cast<double>(tokens)), " tokens, ",
              seconds_text(std::max(left, 0.0)), " left");
  }
  double seconds() const { return seconds_since(start_); }

 private:
  Clock::time_point start_ = Clock::now(), told_ = start_;
};

}  // namespace

void tokenize_documents(const Tokenization& work, CacheWriter& cache) {
  const auto end_of_text = work.tokenizer.end_of_text();
  DocumentBatches batches(work.paths, work.form,
                          work.tokenizer.encodes_in_sections());
  Progress progress;
  while (batches.next()) {
    std::vector<std::string_view> texts;
    for (const auto& part : batches.parts()) texts.push_back(part.text);
    const auto ids = work.tokenizer.encode_texts(texts, work.threads);
    for (size_t i = 0; i < ids.size(); ++i) {
      // Nothing comes before the first document that has a token.
      if (batches.parts()[i].begins && end_of_text && cache.count() > 0) {
        const auto end = static_cast<uint32_t>(*end_of_text);
        cache.add({&end, 1});
      }
      cache.add(ids[i]);
    }
    progress.tell(batches, cache.count());
  }
  log::info("tokenized ", work.paths.size(), " files, ",
            batches.num_documents(), " documents, into ", cache.count(),
            " tokens in ", seconds_text(progress.seconds()));
}

}  // namespace tessera::data::detail
