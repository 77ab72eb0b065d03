// Conversations as samples of one length, in two token caches: ids, and their
// marks.
//
// A sample is a row of seq_len ids; one id more ends the last row, so that the
// sampler's samples, whose last target is the next row's first id, are these
// rows. The first id of a conversation never counts, nor what fills a row.
// A conversation that is longer than a row is cut, and said; what has no
// answer left is left out.
// Errors:  TS_CHECK_CONFIG with file and line of a record, and where no sample
//          is left; TS_CHECK_IO.
#pragma once

#include <string>
#include <vector>

#include "tessera/data/chat_encoder.h"
#include "tessera/data/chat_form.h"
#include "tessera/data/detail/token_cache.h"

namespace tessera::data::detail {

// Of a token: it counts as a target; a conversation begins with it.
enum ChatMark : uint8_t { kCounts = 1, kBegins = 2 };
inline constexpr int64_t kNumChatMarks = 4;  // with all that are both or none

// With the template that the form names or the tokenizer has.
ChatEncoder chat_encoder(const ChatForm& form, const Tokenizer& tokenizer);
// What of the form changes samples, for a cache's key.
std::string describe(const ChatForm& form);

struct ChatWork {
  std::vector<std::string> paths;
  const ChatForm& form;
  const Tokenizer& tokenizer;
  int64_t threads = 0;  // 0: all cores
};

void write_chat_samples(const ChatWork& work, CacheWriter& ids,
                        CacheWriter& marks);

}  // namespace tessera::data::detail
