// The tokens of a training or validation set: its files, one behind the other.
//
// Text (see documents.h) is tokenized once, before ranks open it, into a cache
// file whose name tells the texts and the tokenizer; a cache that is damaged is
// made anew. Where the tokenizer has a token that ends a document, it stands
// between two documents.
// Conversations (see conversation.h) are samples of their own, of which the
// answers count (see detail/chat_samples.h).
// Use:     one rank of each host: prepare_tokens(source); all of them, when it
//          has returned: open_tokens(source).
// Errors:  as token_file.h; TS_CHECK_CONFIG where text comes without a
//          tokenizer, the tokenizer has more ids than the model, files of text
//          and of tokens are mixed, or a text is empty.
// Threads: any may read.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/chat_form.h"
#include "tessera/data/token_file.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

struct TokenSource {
  std::vector<std::string> paths;  // of files: see expand_paths()
  std::string format = "auto";
  std::string field = "text";            // of a record of JSON lines
  int64_t vocab_size = 0;                // of the model
  const Tokenizer* tokenizer = nullptr;  // for text
  std::string cache_folder = "";         // for tokenized text
  int64_t threads = 0;                   // that tokenize; 0: all cores
  ChatForm chat = {};                    // of conversations
  // Attention is of one document; packed conversations are apart always.
  // REQUIRES: a tokenizer with a token that ends a document.
  bool documents_apart = false;
};

class TokenStream {
 public:
  // What is known of tokens beside their ids.
  struct Marks {
    std::optional<TokenFile> chats = {};    // detail::ChatMark of each token
    std::optional<int64_t> separator = {};  // ends a document: these are apart
    bool chats_apart = false;
  };
  // REQUIRES: at least one file.
  TokenStream(std::vector<TokenFile> files,
              std::vector<FileFingerprint> fingerprints)
      : TokenStream(std::move(files), std::move(fingerprints), Marks()) {}
  TokenStream(std::vector<TokenFile> files,
              std::vector<FileFingerprint> fingerprints, Marks marks);

  int64_t size() const { return starts_.back(); }  // tokens
  // Tokens first .. first + out.size() - 1. REQUIRES: the stream has them.
  void read(int64_t first, std::span<int64_t> out) const;
  // TokenFile::will_need() of them, as read().
  void will_need(int64_t first, int64_t count) const;
  bool all_count() const { return !marks_.chats; }
  // Puts kIgnoreIndex in place of those tokens first, first + 1 ... that are no
  // targets. REQUIRES: the stream has them.
  void hide_uncounted(int64_t first, std::span<int64_t> targets) const;

  // Whether attention should keep documents apart.
  bool documents_apart() const {
    return marks_.separator.has_value() || marks_.chats_apart;
  }
  // Of tokens first, first + 1 ...: where among them the document of each
  // begins, 0 for one that begins before; all 0 where they are not apart.
  // REQUIRES: the stream has them.
  void document_starts(int64_t first, std::span<int64_t> starts) const;

  const std::vector<TokenFile>& files() const { return files_; }
  // Of the files that the user named, and of the tokenizer of text.
  const std::vector<FileFingerprint>& fingerprints() const {
    return fingerprints_;
  }
  // Of the caches that are read: the same files may have had other tokens on
  // another day.
  std::vector<FileFingerprint> caches() const;

 private:
  // Tokens begin .. begin + count - 1 of a file, before which `done` came.
  using InFile = std::function<void(const TokenFile& file, int64_t begin,
                                    int64_t count, int64_t done)>;
  // REQUIRES: the stream has them.
  void in_files(int64_t first, int64_t count, const InFile& in_file) const;

  std::vector<TokenFile> files_;
  std::vector<int64_t> starts_;  // of each file, and the end of the last
  std::vector<FileFingerprint> fingerprints_;
  Marks marks_;
};

// Tokenizes what is text and has no cache yet, and checks every id of what is
// tokens. Returns how many tokens open_tokens() has.
int64_t prepare_tokens(const TokenSource& source);
TokenStream open_tokens(const TokenSource& source);
// Whether the source is conversations. TS_CHECK_CONFIG where only some of its
// files are.
bool is_chat(const TokenSource& source);
// Whether the source is text. TS_CHECK_CONFIG where its files are of two kinds.
bool is_text(const TokenSource& source);

}  // namespace tessera::data
