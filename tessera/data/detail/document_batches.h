// The documents of many files, as much at a time as fits into memory.
//
// A document that is long comes in parts, in one batch after another, cut where
// sections end (see sections.h).
// Use:     DocumentBatches batches(paths, form);
//          while (batches.next()) use(batches.parts());
// Errors:  as documents.h.
// Threads: one a reader.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "tessera/data/detail/progress.h"
#include "tessera/data/documents.h"
#include "tessera/data/tokenizer_spec.h"

namespace tessera::data::detail {

struct DocumentPart {
  std::string_view text;
  bool begins = true;  // a document
};

class DocumentBatches {
 public:
  static constexpr size_t kBatchBytes = size_t{32} << 20;

  DocumentBatches(std::vector<std::string> paths, DocumentForm form,
                  SectionEnds ends = SectionEnds::kBehindLetters,
                  size_t batch_bytes = kBatchBytes);

  // Goes to the next batch; false: there is none.
  bool next();
  // Valid until the next call of next().
  const std::vector<DocumentPart>& parts() const { return parts_; }

  int64_t num_documents() const { return num_documents_; }  // so far
  uint64_t consumed() const;  // bytes of the files, so far
  uint64_t total() const { return total_; }
  // Of texts in memory, mapped files aside: no more than of a batch and two
  // documents, those that its ends may cut.
  size_t held_bytes() const;
  // How far it is: in bytes, and what `more` says.
  void tell(Progress& progress, const std::function<std::string()>& more) const;

 private:
  void let_go();
  bool read_document();
  void take(bool begins);

  std::vector<std::string> paths_;
  DocumentForm form_;
  SectionEnds ends_;
  size_t batch_bytes_;
  size_t next_file_ = 0;
  std::deque<Documents> open_;     // the last is read, others back parts_
  std::deque<std::string> texts_;  // of parts_
  std::vector<DocumentPart> parts_;
  // Of the document that was read last: in texts_.back(), or in the mapping of
  // open_.back().
  std::string_view rest_;
  size_t size_ = 0;  // bytes in parts_
  int64_t num_documents_ = 0;
  uint64_t of_files_before_ = 0;
  uint64_t total_ = 0;
};

}  // namespace tessera::data::detail
