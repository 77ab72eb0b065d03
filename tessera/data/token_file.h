// One file of token ids, memory-mapped.
//
// Formats: tokens_u16, tokens_u32   ids alone, little-endian (nanoGPT's .bin)
//          llmc                     header of 1,024 bytes: 20240520 (u16), or
//                                   20240801 (u32), version, count
//          megatron                 .bin with ids and .idx with MMIDIDX
//          cache                    tokenized text that a run keeps
// Checked: the header's sizes against the file's when it is opened, and every
//          id that is read against the vocabulary.
// Errors:  TS_CHECK_IO names the file, the place, the value and the rule;
//          TS_CHECK_CONFIG an empty file.
// Threads: any may read.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tessera/core/files.h"
#include "tessera/data/fingerprint.h"
#include "tessera/data/token_ids.h"

namespace tessera::data {

// "text", "jsonl" or one of the formats above, told by the file's name and
// first bytes: llm.c's and caches by their header, Megatron's by the .idx
// beside the file, ids alone by .bin, .u16 and .u32, JSON lines as documents.h
// says; everything else is text.
std::string detect_format(const std::string& path);

class TokenFile {
 public:
  // `format`: as above, or auto. For megatron
  // `path` may be the .bin, the .idx, or what both begin with.
  TokenFile(const std::string& path, const std::string& format,
            int64_t vocab_size);

  // Reads all ids, at about the speed of reading the file: what a run does
  // once, before it starts ranks.
  void check_ids() const;

  const std::string& path() const { return file_.path(); }
  const std::string& format() const { return format_; }
  int64_t size() const { return ids_.count; }  // tokens
  // Of Megatron's files; 0: the format does not tell.
  int64_t num_documents() const { return num_documents_; }

  // Tokens first .. first + out.size() - 1. REQUIRES: they are in the file.
  void read(int64_t first, std::span<int64_t> out) const;
  // Has the system read tokens first .. first + count - 1 ahead. REQUIRES: as
  // read().
  void will_need(int64_t first, int64_t count) const;

  // Of the file, and of Megatron's .idx.
  const std::vector<FileFingerprint>& fingerprints() const {
    return fingerprints_;
  }

 private:
  void check_range(int64_t first, int64_t size) const;

  MappedFile file_;
  std::string format_;
  TokenIds ids_;
  int64_t num_documents_ = 0;
  int64_t vocab_size_ = 0;
  std::vector<FileFingerprint> fingerprints_;
};

}  // namespace tessera::data
