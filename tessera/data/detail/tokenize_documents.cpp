#include "tessera/data/detail/tokenize_documents.h"

#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/data/detail/document_batches.h"
#include "tessera/data/detail/progress.h"

namespace tessera::data::detail {

void tokenize_documents(const Tokenization& work, CacheWriter& cache) {
  const auto end_of_text = work.tokenizer.end_of_text();
  DocumentBatches batches(work.paths, work.form, work.tokenizer.section_ends());
  Progress progress("tokenizing");
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
    batches.tell(progress, [&] {
      return count_text(static_cast<double>(cache.count())) + " tokens";
    });
  }
  if (!end_of_text && batches.num_documents() > 1) {
    log::warning(
        "documents run into each other: the tokenizer has no token that ends "
        "one (",
        kEndsOfText, ").");
  }
  log::info("tokenized ", work.paths.size(), " files, ",
            batches.num_documents(), " documents, into ", cache.count(),
            " tokens in ", seconds_text(progress.seconds()));
}

}  // namespace tessera::data::detail
