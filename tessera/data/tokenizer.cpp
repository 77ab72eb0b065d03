#include "tessera/data/tokenizer.h"

#include <filesystem>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/detail/added_tokens.h"
#include "tessera/data/detail/bpe.h"
#include "tessera/data/detail/byte_level.h"
#include "tessera/data/detail/parallel_for.h"
#include "tessera/data/detail/sections.h"
#include "tessera/data/detail/splitter.h"
#include "tessera/data/detail/tokenizer_json.h"
#include "tessera/data/detail/utf8.h"
#include "tessera/data/special_tokens.h"

namespace tessera::data {
namespace {

using detail::AddedTokenFinder;

// How many words' tokens an encoder keeps, for long text and for short.
constexpr size_t kCacheWords = size_t{1} << 15;
constexpr size_t kFewCacheWords = size_t{1} << 7;
constexpr size_t kLongText = size_t{1} << 16;

// What is looked for in the text.
std::string content_of(const AddedToken& token, const TokenizerSpec& spec) {
  return token.normalized && spec.nfc ? detail::normalize_nfc(token.content)
                                      : token.content;
}

// What each id stands for. A token with characters outside the byte-level
// alphabet, which only an added one has, stands for itself.
std::vector<std::string> bytes_of_tokens(const TokenizerSpec& spec) {
  std::vector<std::string> bytes;
  for (const std::string& token : spec.tokens) {
    bytes.push_back(detail::from_byte_level(token).value_or(token));
  }
  for (const AddedToken& token : spec.added) {
    if (static_cast<size_t>(token.id) >= bytes.size()) {
      bytes.resize(token.id + 1);
    }
    const std::string content = content_of(token, spec);
    bytes[token.id] = detail::from_byte_level(content).value_or(content);
  }
  return bytes;
}

// What the merges may make: without the tokens that are no byte-level ones.
std::vector<std::string> byte_level_tokens(const TokenizerSpec& spec,
                                           const std::string& source) {
  std::vector<std::string> tokens;
  std::array<bool, 256> has_byte{};
  for (const std::string& token : spec.tokens) {
    tokens.push_back(detail::from_byte_level(token).value_or(""));
    if (tokens.back().size() == 1) {
      has_byte[static_cast<uint8_t>(tokens.back()[0])] = true;
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    TS_CHECK_IO(has_byte[byte], source,
                ": the vocabulary has no token for the "
                "byte ",
                detail::byte_name(static_cast<uint8_t>(byte)),
                "; a byte-level vocabulary has one for each of the 256.");
  }
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    for (const uint32_t id : {spec.merges[i].first, spec.merges[i].second}) {
      TS_CHECK_IO(id < tokens.size() && !tokens[id].empty(), source, ": merge ",
                  i, " joins the id ", id,
                  ", which stands for no bytes: merges join tokens in the "
                  "byte-level alphabet.");
    }
  }
  return tokens;
}

}  // namespace

struct Tokenizer::Impl {
  Impl(TokenizerSpec spec_in, const std::string& source)
      : spec(std::move(spec_in)),
        bytes(bytes_of_tokens(spec)),
        is_special(bytes.size()),
        splitter(spec.pattern),
        bpe(byte_level_tokens(spec, source), spec.merges, spec.ignore_merges) {
    for (AddedToken token : spec.added) {
      is_special[token.id] = is_special[token.id] || token.special;
      token.content = content_of(token, spec);
      (token.normalized ? normalized_finder : raw_finder).add(token);
    }
    raw_finder.finish();
    normalized_finder.finish();
    check_ids(spec.before, source);
    check_ids(spec.after, source);
  }

  void check_ids(const std::vector<int64_t>& ids,
                 const std::string& source) const {
    for (const int64_t id : ids) {
      TS_CHECK_IO(is_token(id), source,
                  ": post_processor: no token has the id ", id, ".");
    }
  }
  bool is_token(int64_t id) const {
    return id >= 0 && id < static_cast<int64_t>(bytes.size()) &&
           !bytes[id].empty();
  }

  TokenizerSpec spec;
  std::vector<std::string> bytes;  // by id
  std::vector<bool> is_special;    // by id
  detail::Splitter splitter;
  detail::Bpe bpe;
  AddedTokenFinder raw_finder;
  AddedTokenFinder normalized_finder;
};

namespace {

std::optional<int64_t> usual_end(const Tokenizer& tokenizer) {
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
    if (const auto id = tokenizer.id_of(name)) return id;
  }
  return {};
}

// One thread's way from text to ids.
class Encoder {
 public:
  Encoder(const TokenizerSpec& spec, const detail::Splitter& splitter,
          const detail::Bpe& bpe, size_t cache_words)
      : spec_(spec), splitter_(splitter), words_(bpe, cache_words) {}

  void encode(std::string_view text, const AddedTokenFinder& raw,
              const AddedTokenFinder& normalized) {
    const auto words = [this](std::string_view plain) { encode_words(plain); };
    for_each_piece(text, raw, [&](std::string_view piece) {
      if (!spec_.nfc) return for_each_piece(piece, normalized, words);
      const std::string composed = detail::normalize_nfc(piece);
      for_each_piece(composed, normalized, words);
    });
  }

  std::vector<uint32_t> ids;

 private:
  // Calls `on_text` for what lies between added tokens.
  template <typename OnText>
  void for_each_piece(std::string_view text, const AddedTokenFinder& finder,
                      const OnText& on_text) {
    for (size_t at = 0; at < text.size();) {
      const AddedTokenFinder::Found found = finder.find(text, at);
      if (found.begin > at) on_text(text.substr(at, found.begin - at));
      if (found.id >= 0) ids.push_back(static_cast<uint32_t>(found.id));
      at = found.end;
    }
  }

  void encode_words(std::string_view text) {
    std::string with_space;
    if (spec_.add_prefix_space && !text.starts_with(' ')) {
      with_space.append(" ").append(text);
      text = with_space;
    }
    detail::WordCursor cursor(splitter_, text);
    for (std::string_view word; cursor.next(word);) words_.encode(word, ids);
  }

  const TokenizerSpec& spec_;
  const detail::Splitter& splitter_;
  detail::WordEncoder words_;
};

}  // namespace

Tokenizer::Tokenizer(TokenizerSpec spec, const std::string& source)
    : impl_(std::make_unique<Impl>(std::move(spec), source)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::string& path) {
  std::filesystem::path file(path);
  if (std::filesystem::is_directory(file)) file /= "tokenizer.json";
  const std::string text = tessera::detail::read_json_text(file);
  TokenizerSpec spec = detail::read_tokenizer_json(text, file.string());
  spec.eos_token = eos_token_of(file.string()).value_or("");
  return Tokenizer(std::move(spec), file.string());
}

void Tokenizer::save(const std::string& path) const {
  if (path.ends_with(".json")) return write_file_atomic(path, to_json());
  const std::filesystem::path folder(path);
  const std::optional<int64_t> eos = end_of_text();
  write_file_atomic(folder / "tokenizer.json", to_json());
  write_file_atomic(folder / "tokenizer_config.json",
                    detail::write_tokenizer_config(
                        impl_->spec, eos ? impl_->bytes[*eos] : ""));
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(impl_->bytes.size());
}

std::optional<int64_t> Tokenizer::id_of(const std::string& added_token) const {
  for (const AddedToken& token : impl_->spec.added) {
    if (token.content == added_token) return token.id;
  }
  return {};
}

std::optional<int64_t> Tokenizer::end_of_text() const {
  const auto usual = usual_end(*this);
  return usual ? usual : id_of(impl_->spec.eos_token);
}

std::string Tokenizer::identity() const {
  const bool is_usual = usual_end(*this) == end_of_text();
  return to_json() + (is_usual ? "" : impl_->spec.eos_token);
}

std::vector<int64_t> Tokenizer::encode(std::string_view text,
                                       bool special_tokens) const {
  detail::check_utf8(text, "text");
  Encoder encoder(impl_->spec, impl_->splitter, impl_->bpe,
                  text.size() < kLongText ? kFewCacheWords : kCacheWords);
  encoder.encode(text, impl_->raw_finder, impl_->normalized_finder);
  std::vector<int64_t> ids;
  if (special_tokens) ids = impl_->spec.before;
  ids.insert(ids.end(), encoder.ids.begin(), encoder.ids.end());
  if (special_tokens) {
    ids.insert(ids.end(), impl_->spec.after.begin(), impl_->spec.after.end());
  }
  return ids;
}

SectionEnds Tokenizer::section_ends() const {
  const SectionEnds ends = impl_->spec.add_prefix_space
                               ? SectionEnds::kBeforeSpaces
                               : SectionEnds::kBehindLetters;
  const bool is_cut = impl_->raw_finder.is_cut_by(ends) ||
                      impl_->normalized_finder.is_cut_by(ends);
  return is_cut ? SectionEnds::kNone : ends;
}

std::vector<std::vector<uint32_t>> Tokenizer::encode_texts(
    const std::vector<std::string_view>& texts, int64_t threads) const {
  const SectionEnds ends = section_ends();
  std::vector<std::string_view> sections;
  std::vector<size_t> first_section;
  for (const std::string_view text : texts) {
    detail::check_utf8(text, "text");
    first_section.push_back(sections.size());
    detail::append_sections(text, ends, sections);
  }
  first_section.push_back(sections.size());
  std::vector<std::vector<uint32_t>> section_ids(sections.size());
  detail::parallel_for(sections.size(), threads, [&] {
    auto encoder = std::make_shared<Encoder>(impl_->spec, impl_->splitter,
                                             impl_->bpe, kCacheWords);
    return [&, encoder](size_t i) {
      encoder->encode(sections[i], impl_->raw_finder, impl_->normalized_finder);
      section_ids[i] = std::exchange(encoder->ids, {});
    };
  });
  std::vector<std::vector<uint32_t>> ids(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    for (size_t k = first_section[i]; k < first_section[i + 1]; ++k) {
      const std::vector<uint32_t> part = std::exchange(section_ids[k], {});
      ids[i].insert(ids[i].end(), part.begin(), part.end());
    }
  }
  return ids;
}

std::string Tokenizer::decode_bytes(std::span<const int64_t> ids,
                                    bool special_tokens) const {
  std::string bytes;
  for (const int64_t id : ids) {
    // Ids that the vocabulary leaves out stand for nothing, as elsewhere.
    TS_CHECK_IO(id >= 0 && id < vocab_size(), "decode: no token has the id ",
                id, "; the vocabulary's ids are 0 to ", vocab_size() - 1, ".");
    if (special_tokens || !impl_->is_special[id]) bytes += impl_->bytes[id];
  }
  return bytes;
}

std::string Tokenizer::decode(std::span<const int64_t> ids,
                              bool special_tokens) const {
  return detail::replace_invalid_utf8(decode_bytes(ids, special_tokens));
}

const TokenizerSpec& Tokenizer::spec() const { return impl_->spec; }

std::string Tokenizer::to_json() const {
  return detail::write_tokenizer_json(impl_->spec);
}

}  // namespace tessera::data
