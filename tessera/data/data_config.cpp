#include "tessera/data/data_config.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

std::string complaint_about_pair(const config::Value& value) {
  const auto& keys = std::get<std::vector<std::string>>(value);
  if (keys.empty() || keys.size() == 2) return "";
  return "it must be two keys, of the prompt and of the answer";
}

constexpr int64_t kMostBatches = 1'000'000'000;

// "101:150", or "101" for one; std::nullopt: it is no such range.
std::optional<Skip> batches_of(const std::string& text) {
  Skip batches;
  const char* end = text.data() + text.size();
  auto read = std::from_chars(text.data(), end, batches.begin);
  batches.end = batches.begin;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == ':') {
    read = std::from_chars(read.ptr + 1, end, batches.end);
  }
  const bool is_range = read.ec == std::errc() && read.ptr == end &&
                        batches.begin >= 1 && batches.end >= batches.begin &&
                        batches.end <= kMostBatches;
  if (!is_range) return std::nullopt;
  --batches.begin;
  return batches;
}

std::string complaint_about_skip(const config::Value& value) {
  int64_t behind = 0;
  for (const auto& text : std::get<std::vector<std::string>>(value)) {
    const auto batches = batches_of(text);
    if (!batches) {
      return "each is a first and a last batch, from 1, as 101:150";
    }
    if (batches->begin < behind) return "each begins behind the one before";
    behind = batches->end;
  }
  return "";
}

std::string complaint_about_weights(const config::Value& value) {
  const auto& weights = std::get<std::vector<double>>(value);
  if (weights.empty()) return "";
  for (const double weight : weights) {
    if (!(weight >= 0) || weight > 1e12) return "weights are from 0 to 1e12";
  }
  const bool any =
      std::ranges::any_of(weights, [](double weight) { return weight > 0; });
  return any ? "" : "at least one must be more than 0";
}

}  // namespace

void DataConfig::declare(config::Section& section) {
  section.key("train", train, "files to train on: paths, folders or globs");
  section.key("valid", valid,
              "files to validate on, when validate.* says: paths, folders or "
              "globs; none: no validation");
  section
      .key("weights", weights,
           "of the entries of train, one number each: samples are taken from "
           "each in this proportion, on whatever mesh, and each has epochs of "
           "its own; none: all entries are one set")
      .check(complaint_about_weights);
  section
      .key("valid_share", valid_share,
           "of each source's samples, evenly spread: held out of training and "
           "validated on, in place of data.valid; 0: none")
      .at_least(0)
      .check([](const config::Value& value) {
        return std::get<double>(value) < 1 ? "" : "it must be below 1";
      });
  section.key("exclude", exclude,
              "what to leave out of train and valid: globs that match a name, "
              "or names one below the other, of a file or folder, as *.png or "
              "drafts/*.txt");
  section
      .key("format", format,
           "of the files; auto: told by their names and contents")
      .one_of({"auto", "text", "jsonl", "chat", "tokens_u16", "tokens_u32",
               "llmc", "megatron"});
  section.key("field", field, "of a record of JSON: where its text is");
  section.key("chat_template", chat_template,
              "of conversations: a file; empty: that of the tokenizer's "
              "folder; none: pairs of prompt and answer as plain text");
  section
      .key("pair", pair,
           "keys of prompt and answer in a record of JSON; empty: those "
           "that are usual, as prompt and completion, question and answer")
      .check(complaint_about_pair);
  section
      .key("loss_on", loss_on,
           "which tokens of conversations are learned: what the assistant "
           "writes, or all")
      .one_of({"answers", "all"});
  section.key("packing", packing,
              "several conversations in a sample, one behind the other, where "
              "they fit, none of which sees another; else each has its own");
  section.key("intra_document_masking", intra_document_masking,
              "attention and learned positions within a document alone: a "
              "token does not see the documents before its own in a sample; "
              "the tokenizer must have a token that ends a document");
  section
      .key("skip", skip,
           "batches of train that are left out, each as 101:150, numbered from "
           "1 as steps are that leave out none: of a run that goes on from a "
           "checkpoint before them, to get past what it fails at")
      .check(complaint_about_skip);
  section.key("tokenizer", tokenizer,
              "tokenizer.json, or a folder with it; none: one is trained on "
              "the text");
  section.key("seq_len", seq_len, "tokens of a sample")
      .at_least(1)
      .at_most(1 << 24);
  section.key("shuffle", shuffle,
              "samples in an order drawn from the seed, else as they lie");
  section
      .key("reader", reader,
           "which of the ranks that train on the same samples (they differ "
           "along pp, cp and tp alone) read the files: every one that needs "
           "them, or the first, for all of them: the others need no files")
      .one_of({"every", "first"});
}

std::vector<Skip> DataConfig::skips(int64_t global_batch) const {
  std::vector<Skip> all;
  for (const std::string& text : skip) {
    const Skip batches = *batches_of(text);
    all.push_back({.begin = batches.begin * global_batch,
                   .end = batches.end * global_batch});
  }
  return joined(std::move(all));
}

void DataConfig::check() const {
  TS_CHECK_CONFIG(weights.empty() || weights.size() == train.size(),
                  "data.weights has ", weights.size(),
                  " numbers, and data.train ", train.size(),
                  " entries. Give each entry one.");
  TS_CHECK_CONFIG(valid_share == 0 || valid.empty(), "data.valid_share (",
                  valid_share,
                  ") holds out a part of data.train, but data.valid names "
                  "files to validate on. Leave one of the two out.");
}

}  // namespace tessera::data
