// tessera tokenize: trains a byte-level BPE tokenizer, encodes and decodes.
#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/flags_for_keys.h"
#include "cli/standard_input.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/documents.h"
#include "tessera/data/file_list.h"
#include "tessera/data/token_file.h"
#include "tessera/data/tokenizer.h"
#include "tessera/data/tokenizer_trainer.h"
#include "tessera/models/model_config.h"

namespace tessera::cli {
namespace {

using detail::Json;

struct TrainingFlags {
  std::vector<std::string> input, exclude;
  std::string field = "text";
  std::string output;
  std::string pattern = "gpt2";
  data::TokenizerTraining training;
};

struct EncodeFlags {
  std::string tokenizer;
  std::vector<std::string> input, exclude;
  std::string field = "text";
  std::string output;
  std::string dtype;
  bool jsonl = false;
  bool special_tokens = false;
  int64_t threads = 0;
};

struct DecodeFlags {
  std::string tokenizer;
  std::string input;
  std::string format = "auto";
  std::vector<int64_t> ids;
  bool jsonl = false;
  bool special_tokens = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

// A tokenizer may be replaced, and nothing else.
void check_tokenizer_output(const std::string& path) {
  if (!path.ends_with(".json") || !std::filesystem::exists(path)) return;
  bool is_tokenizer = false;
  try {
    data::Tokenizer::load(path);
    is_tokenizer = true;
  } catch (const Error& error) {
    log::debug(message_of(error));
  }
  TS_CHECK_USAGE(is_tokenizer, "--output ", path,
                 " is there already and is no tokenizer; nothing was written.");
}

void train(TrainingFlags& flags) {
  flags.training.pattern = flags.pattern == "gpt2"
                               ? data::SplitPattern::kGpt2
                               : data::SplitPattern::kLlama3;
  check_tokenizer_output(flags.output);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> paths =
      data::expand_paths(flags.input, "--input", flags.exclude);
  const data::Tokenizer tokenizer = data::train_tokenizer_on_files(
      paths, flags.training, {.field = flags.field});
  tokenizer.save(flags.output);
  log::info("trained on ", paths.size(), " files in ", seconds_since(start),
            " s");
  std::cout << Json({{"output", flags.output},
                     {"vocab_size", tokenizer.vocab_size()},
                     {"merges", tokenizer.spec().merges.size()}})
                   .dump()
            << std::endl;
}

// Of lines: each a string or an object with the field.
std::vector<std::string> texts_of_lines(const std::string& content,
                                        const std::string& name,
                                        const std::string& field) {
  std::vector<std::string> texts;
  for (const std::string& line : lines_of(content)) {
    const std::string source = c10::str(name, ": text ", texts.size() + 1);
    const Json json = detail::parse_json(line, source);
    texts.push_back(detail::as_string(
        json.is_object() && json.contains(field) ? json[field] : json, source));
  }
  return texts;
}

// The documents of the input, as training would read them; with --jsonl lines.
std::vector<std::string> texts_of(const EncodeFlags& flags) {
  if (flags.input.empty() || flags.input == std::vector<std::string>{"-"}) {
    const std::string content = read_standard_input();
    if (!flags.jsonl) return {content};
    return texts_of_lines(content, "standard input", flags.field);
  }
  std::vector<std::string> texts;
  for (const std::string& path :
       data::expand_paths(flags.input, "--input", flags.exclude)) {
    if (flags.jsonl) {
      const auto lines = texts_of_lines(read_file(path), path, flags.field);
      texts.insert(texts.end(), lines.begin(), lines.end());
      continue;
    }
    data::Documents documents(path, {.field = flags.field});
    while (const auto text = documents.next()) texts.emplace_back(*text);
  }
  TS_CHECK_CONFIG(
      !texts.empty(), flags.input[0],
      flags.input.size() > 1 ? " and the other inputs" : "",
      ": no text to encode: no document is in there. Give --input a "
      "file that has some.");
  return texts;
}

// The type of ids that training takes a file of that name for; "": none.
std::string dtype_of_name(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  if (extension == ".u32") return "u32";
  return extension == ".u16" || extension == ".bin" ? "u16" : "";
}

// Nobody's text or configuration is replaced by ids.
void check_output(const std::string& name) {
  if (!std::filesystem::exists(name)) return;
  // Behind a link: of what is there.
  const std::string path = std::filesystem::canonical(name);
  const bool is_file = std::filesystem::is_regular_file(path);
  const std::string format = is_file ? data::detect_format(path) : "no file";
  TS_CHECK_USAGE(format == "tokens_u16" || format == "tokens_u32", "--output ",
                 path, " is there already and is ", is_file ? "a file of " : "",
                 format, ", not of ids alone; nothing was written.");
}

std::string dtype_to_write(const EncodeFlags& flags,
                           const data::Tokenizer& tokenizer) {
  const bool narrow_fits = tokenizer.vocab_size() <= 1 << 16;
  const std::string named = dtype_of_name(flags.output);
  std::string dtype = flags.dtype;
  if (dtype.empty()) dtype = named;
  if (dtype.empty()) dtype = narrow_fits ? "u16" : "u32";
  TS_CHECK_USAGE(dtype == "u32" || narrow_fits, "--output ", flags.output,
                 ": 16 bits hold ids below ", 1 << 16,
                 ", but the tokenizer has ", tokenizer.vocab_size(),
                 ". Give it a name with .u32.");
  if (dtype != named) {
    log::warning(flags.output, ": training takes it for ",
                 named.empty() ? "text" : "ids of " + named,
                 " by its name, and", " it has ids of ", dtype, ". Name it .",
                 dtype, ", or set data.format to tokens_", dtype);
  }
  return dtype;
}

// Ids alone, little-endian, with the token that ends a document between texts.
void write_ids(const EncodeFlags& flags, const std::string& dtype,
               const data::Tokenizer& tokenizer,
               const std::vector<std::vector<uint32_t>>& texts) {
  const size_t width = dtype == "u16" ? 2 : 4;
  std::string bytes;
  const auto append = [&](uint32_t id) {
    bytes.append(reinterpret_cast<const char*>(&id), width);
  };
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto end_of_text = tokenizer.end_of_text();
    if (i > 0 && end_of_text) append(static_cast<uint32_t>(*end_of_text));
    for (const uint32_t id : texts[i]) append(id);
  }
  write_file_atomic(flags.output, bytes);
  std::cout << Json({{"output", flags.output},
                     {"dtype", dtype},
                     {"tokens", bytes.size() / width}})
                   .dump()
            << std::endl;
}

void encode(const EncodeFlags& flags) {
  const data::Tokenizer tokenizer = data::Tokenizer::load(flags.tokenizer);
  std::string dtype;
  if (!flags.output.empty()) {
    check_output(flags.output);
    dtype = dtype_to_write(flags, tokenizer);
  }
  const std::vector<std::string> texts = texts_of(flags);
  const auto start = std::chrono::steady_clock::now();
  auto ids =
      tokenizer.encode_texts({texts.begin(), texts.end()}, flags.threads);
  size_t bytes = 0;
  for (const std::string& text : texts) bytes += text.size();
  log::info("encoded ", bytes, " bytes in ", seconds_since(start), " s");
  if (flags.special_tokens) {
    for (auto& text : ids) {
      const auto& spec = tokenizer.spec();
      text.insert(text.begin(), spec.before.begin(), spec.before.end());
      text.insert(text.end(), spec.after.begin(), spec.after.end());
    }
  }
  if (!flags.output.empty()) return write_ids(flags, dtype, tokenizer, ids);
  for (const auto& text : ids) std::cout << Json(text).dump() << '\n';
  std::cout.flush();
}

void decode_lines(const DecodeFlags& flags, const data::Tokenizer& tokenizer) {
  const std::string text =
      flags.input.empty() ? read_standard_input() : read_file(flags.input);
  for (const std::string& line : lines_of(text)) {
    const Json json = detail::parse_json(line, "a line of ids");
    TS_CHECK_IO(json.is_array(), "a line of ids is not an array: ", line);
    std::vector<int64_t> ids;
    for (const Json& id : json) {
      ids.push_back(detail::as_int(id, "a line of ids"));
    }
    std::cout << Json(tokenizer.decode(ids, flags.special_tokens)).dump()
              << '\n';
  }
  std::cout.flush();
}

void decode(const DecodeFlags& flags) {
  const data::Tokenizer tokenizer = data::Tokenizer::load(flags.tokenizer);
  if (flags.jsonl) return decode_lines(flags, tokenizer);
  std::vector<int64_t> ids = flags.ids;
  TS_CHECK_USAGE(ids.empty() != flags.input.empty(),
                 "give ids, or --input FILE, or --jsonl.");
  if (!flags.input.empty()) {
    const data::TokenFile file(flags.input, flags.format,
                               tokenizer.vocab_size());
    ids.resize(file.size());
    file.read(0, ids);
  }
  const std::string bytes = tokenizer.decode_bytes(ids, flags.special_tokens);
  std::cout.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  std::cout.flush();
}

// What they are called in the configuration.
void with_input_flags(const std::function<void()>& work) {
  with_flags_for({{"data.field", "--field"},
                  {"data.exclude", "--exclude"},
                  {"set data.format to text or name", "name"}},  // it has none
                 work);
}

void add_input_flags(CLI::App& command, std::vector<std::string>& exclude,
                     std::string& field) {
  command.add_option("--exclude", exclude,
                     "Names of files or folders to leave out: globs");
  command
      .add_option("--field", field, "Of a record of JSON: where its text is")
      ->capture_default_str();
}

void add_train_command(CLI::App& tokenize) {
  auto flags = std::make_shared<TrainingFlags>();
  CLI::App* command =
      tokenize.add_subcommand("train", "Learn a vocabulary from text");
  command->add_option("--input", flags->input, "Files, folders or globs")
      ->required();
  add_input_flags(*command, flags->exclude, flags->field);
  command
      ->add_option("--vocab-size", flags->training.vocab_size,
                   "With the 256 bytes and the special tokens")
      ->capture_default_str()
      ->check(whole_number(1, models::kMaxSize));
  command
      ->add_option("--output", flags->output,
                   "A file *.json, or a folder for tokenizer.json")
      ->required();
  command->add_option("--pattern", flags->pattern, "How text is cut into words")
      ->check(CLI::IsMember({"gpt2", "llama3"}))
      ->capture_default_str();
  command
      ->add_option("--special", flags->training.special_tokens,
                   "Special tokens; the first ids are theirs")
      ->capture_default_str();
  command->add_option("--threads", flags->training.threads, "0: all cores")
      ->check(whole_number(0, 4096));
  command->callback([flags] { with_input_flags([&] { train(*flags); }); });
}

void add_encode_command(CLI::App& tokenize) {
  auto flags = std::make_shared<EncodeFlags>();
  CLI::App* command = tokenize.add_subcommand(
      "encode", "Text to ids: to a token file, else as JSON to stdout");
  command
      ->add_option("--tokenizer", flags->tokenizer,
                   "tokenizer.json, or a folder with it")
      ->required();
  command->add_option("--input", flags->input,
                      "Files, folders or globs; none, or -: standard input");
  add_input_flags(*command, flags->exclude, flags->field);
  command->add_option("--output", flags->output,
                      "A file of ids alone: .u16, .u32, or .bin (16 bits)");
  command
      ->add_option("--dtype", flags->dtype, "Of --output; default: by its name")
      ->check(CLI::IsMember({"u16", "u32"}));
  command->add_flag("--jsonl", flags->jsonl,
                    "Each line of the input, whatever its name, is a text: a "
                    "JSON string, or an object with --field");
  command->add_flag("--special-tokens", flags->special_tokens,
                    "With what the tokenizer puts around a text");
  command->add_option("--threads", flags->threads, "0: all cores")
      ->check(whole_number(0, 4096));
  command->callback([flags] { with_input_flags([&] { encode(*flags); }); });
}

void add_decode_command(CLI::App& tokenize) {
  auto flags = std::make_shared<DecodeFlags>();
  CLI::App* command =
      tokenize.add_subcommand("decode", "Ids to text, on stdout");
  command
      ->add_option("--tokenizer", flags->tokenizer,
                   "tokenizer.json, or a folder with it")
      ->required();
  command->add_option("ids", flags->ids, "Ids")->check(whole_number(0));
  command->add_option("--input", flags->input,
                      "A token file, or a run's token cache");
  command->add_option("--format", flags->format, "Of --input")
      ->check(CLI::IsMember(
          {"auto", "tokens_u16", "tokens_u32", "llmc", "megatron", "cache"}))
      ->capture_default_str();
  command->add_flag("--jsonl", flags->jsonl,
                    "Lines of ids, as JSON arrays, from --input or standard "
                    "input to lines of JSON strings");
  command->add_flag("--special-tokens", flags->special_tokens,
                    "Show special tokens too");
  command->callback([flags] { decode(*flags); });
}

}  // namespace

void add_tokenize(CLI::App& program) {
  CLI::App* tokenize = program.add_subcommand(
      "tokenize", "Train a tokenizer, encode and decode");
  tokenize->require_subcommand(1);
  add_train_command(*tokenize);
  add_encode_command(*tokenize);
  add_decode_command(*tokenize);
}

}  // namespace tessera::cli
