#include "tessera/data/detail/chat_samples.h"

#include <algorithm>
#include <filesystem>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/conversation.h"
#include "tessera/data/detail/parallel_for.h"
#include "tessera/data/special_tokens.h"

namespace tessera::data::detail {
namespace {

// Conversations that are read before threads encode them.
constexpr size_t kBatch = 4096;
// Rows that wait for what fits into them.
constexpr size_t kOpenRows = 64;

std::optional<ChatTemplate> template_of(const ChatForm& form) {
  if (form.chat_template == "none") return std::nullopt;
  if (form.chat_template.empty()) return ChatTemplate::find(form.tokenizer);
  return ChatTemplate::read(form.chat_template, form.tokenizer);
}

// The token that ends a text: as the tokenizer's configuration has it.
std::optional<int64_t> end_of(const ChatForm& form,
                              const Tokenizer& tokenizer) {
  const auto token = eos_token_of(form.tokenizer);
  return token ? tokenizer.id_of(*token) : tokenizer.end_of_text();
}

void warn_of_date(const ChatForm& form) {
  const auto chat = template_of(form);
  if (!chat || chat->source().find("strftime_now") == std::string::npos) return;
  log::warning(chat->name(),
               ": the chat template may write today's date (strftime_now), "
               "which then is in all conversations that are trained on, and "
               "stays in their cache. To train on another date, or on none, "
               "set data.chat_template to a copy that says so.");
}

class Rows {
 public:
  Rows(const ChatForm& form, uint32_t fill, CacheWriter& ids,
       CacheWriter& marks)
      : form_(form), fill_(fill), ids_(ids), marks_(marks) {}

  // A conversation, which may be several lists, or none.
  void add(std::vector<ChatTokens> lists) {
    Fate fate = Fate::kUnwritten;
    bool is_cut = false;
    for (ChatTokens& tokens : lists) {
      is_cut = is_cut || std::ssize(tokens.ids) > form_.seq_len;
      fate = std::max(fate, add_list(tokens));
    }
    ++num_conversations_;
    if (fate == Fate::kUnwritten) ++num_unwritten_;
    if (fate == Fate::kWithout) ++num_without_;
    if (is_cut) ++num_cut_;
  }

  void finish() {
    while (!open_.empty()) write(open_.begin());
    const uint32_t none = 0;
    ids_.add({&fill_, 1});
    marks_.add({&none, 1});
  }

  // `writer`: what the conversations were written by, for messages.
  void tell(const std::string& name, const std::string& writer) const {
    TS_CHECK_CONFIG(
        num_unwritten_ == 0 || num_unwritten_ < num_conversations_, name, ": ",
        writer, " writes nothing of an answer for any of ", num_conversations_,
        " conversations. Give a data.chat_template that does.");
    if (num_unwritten_ > 0) {
      log::warning(name, ": of ", num_unwritten_, " of ", num_conversations_,
                   " conversations ", writer,
                   " writes nothing of an answer; they were left out");
    }
    if (num_cut_ > 0) {
      log::warning(name, ": ", num_cut_, " of ", num_conversations_,
                   " conversations have more than data.seq_len (",
                   form_.seq_len, ") tokens and were cut");
    }
    if (num_without_ > 0) {
      log::warning(name, ": ", num_without_, " of ", num_conversations_,
                   " conversations have no answer within data.seq_len (",
                   form_.seq_len, ") and were left out");
    }
    log::info(name, ": ", num_conversations_ - num_without_ - num_unwritten_,
              " conversations in ", num_rows_, " samples of ", form_.seq_len,
              " tokens, of which ", num_counted_, " count");
    TS_CHECK_CONFIG(num_rows_ > 0, name, ": of ", num_conversations_,
                    " conversations none has an answer within data.seq_len (",
                    form_.seq_len, "). Give a larger data.seq_len.");
  }

 private:
  // What lies in a row so far.
  struct Row {
    std::vector<uint32_t> ids = {}, marks = {};
    void add(const ChatTokens& tokens) {
      ids.insert(ids.end(), tokens.ids.begin(), tokens.ids.end());
      const size_t begin = marks.size();
      for (const bool answers : tokens.answers) {
        marks.push_back(answers ? kCounts : 0);
      }
      marks[begin] |= kBegins;
    }
  };
  using Open = std::vector<Row>;
  // Of a list: nothing of it is an answer, none is within the row, or it is in
  // one.
  enum class Fate { kUnwritten, kWithout, kPlaced };

  Fate add_list(ChatTokens& tokens) {
    const auto has_answer = [&] {
      return std::ranges::find(tokens.answers, true) != tokens.answers.end();
    };
    if (form_.loss_on == "all") {
      tokens.answers.assign(tokens.ids.size(), true);
    }
    if (!has_answer()) return Fate::kUnwritten;
    const auto size = std::min<size_t>(tokens.ids.size(), form_.seq_len);
    tokens.ids.resize(size);
    tokens.answers.resize(size);
    tokens.answers[0] = false;
    if (!has_answer()) return Fate::kWithout;
    place(tokens);
    return Fate::kPlaced;
  }

  // Into the first row that has room; without packing each has its own.
  void place(const ChatTokens& tokens) {
    const auto size = static_cast<size_t>(form_.seq_len);
    const auto fits = [&](const Row& row) {
      return row.ids.size() + tokens.ids.size() <= size;
    };
    const auto row =
        form_.packing ? std::ranges::find_if(open_, fits) : open_.end();
    if (row != open_.end()) return row->add(tokens);
    if (open_.size() == (form_.packing ? kOpenRows : 1)) {
      write(std::ranges::max_element(
          open_, {}, [](const Row& one) { return one.ids.size(); }));
    }
    open_.emplace_back().add(tokens);
  }

  void write(Open::iterator row) {
    num_counted_ += std::ranges::count_if(
        row->marks, [](uint32_t mark) { return (mark & kCounts) != 0; });
    row->ids.resize(form_.seq_len, fill_);
    row->marks.resize(form_.seq_len, 0);
    ids_.add(row->ids);
    marks_.add(row->marks);
    ++num_rows_;
    open_.erase(row);
  }

  const ChatForm& form_;
  uint32_t fill_;
  CacheWriter& ids_;
  CacheWriter& marks_;
  Open open_;
  int64_t num_conversations_ = 0, num_cut_ = 0, num_without_ = 0,
          num_unwritten_ = 0;
  int64_t num_rows_ = 0, num_counted_ = 0;
};

struct Placed {
  Conversation conversation;
  std::string place;
  std::vector<ChatTokens> tokens = {};
};

void encode(const ChatEncoder& encoder, std::vector<Placed>& batch,
            int64_t max_tokens, int64_t threads) {
  parallel_for(batch.size(), threads, [&] {
    return [&](size_t i) {
      try {
        batch[i].tokens = encoder.encode(batch[i].conversation, max_tokens);
      } catch (const Error& error) {
        TS_CHECK_CONFIG(false, batch[i].place, ": ",
                        error.what_without_backtrace());
      }
    };
  });
}

}  // namespace

ChatEncoder chat_encoder(const ChatForm& form, const Tokenizer& tokenizer) {
  return {tokenizer, template_of(form), end_of(form, tokenizer)};
}

std::string describe(const ChatForm& form) {
  std::string text = c10::str(" tessera-chats-2 of ", form.seq_len, ' ',
                              form.packing, ' ', form.loss_on, ' ');
  for (const std::string& key : form.pair) {
    text += tessera::detail::in_quotes(key) + ' ';
  }
  const auto chat = template_of(form);
  for (const auto& [name, token] : special_tokens_of(form.tokenizer)) {
    text += name + '=' + token + ' ';
  }
  // Where one of two templates marks answers, older versions made other
  // samples; all other caches are as they would be made now.
  if (chat && chat->marks_answers(/*has_tools=*/true) !=
                  chat->marks_answers(/*has_tools=*/false)) {
    text += "each marks ";
  }
  return text + (chat ? chat->source() : "no template");
}

void write_chat_samples(const ChatWork& work, CacheWriter& ids,
                        CacheWriter& marks) {
  warn_of_date(work.form);
  const ChatEncoder encoder = chat_encoder(work.form, work.tokenizer);
  const auto fill = end_of(work.form, work.tokenizer).value_or(0);
  Rows rows(work.form, static_cast<uint32_t>(fill), ids, marks);
  for (const std::string& path : work.paths) {
    Conversations conversations(path, work.form.pair);
    bool more = true;
    while (more) {
      std::vector<Placed> batch;
      while (more && batch.size() < kBatch) {
        auto next = conversations.next();
        more = next.has_value();
        if (more) batch.push_back({std::move(*next), conversations.place()});
      }
      encode(encoder, batch, work.form.seq_len, work.threads);
      for (Placed& one : batch) {
        rows.add(std::move(one.tokens));
      }
    }
  }
  rows.finish();
  const auto chat = template_of(work.form);
  const size_t others = work.paths.size() - 1;
  rows.tell(others == 0
                ? work.paths[0]
                : c10::str(work.paths[0], " and ", others, " files more"),
            chat ? "the chat template " + chat->name() : "a pair");
}

}  // namespace tessera::data::detail
