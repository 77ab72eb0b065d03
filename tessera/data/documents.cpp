#include "tessera/data/documents.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/units.h"
#include "tessera/data/detail/byte_reader.h"
#include "tessera/data/detail/foreign_files.h"
#include "tessera/data/detail/json_records.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data {

// One file, in one of three ways.
struct Documents::Impl {
  virtual ~Impl() = default;
  virtual std::optional<std::string_view> next() = 0;
  virtual bool stays() const { return false; }
  virtual std::string place() const = 0;
  virtual uint64_t consumed() const = 0;
};

namespace {

using detail::ByteReader;

void check_text(std::string_view text, const std::string& path) {
  const size_t at = detail::find_invalid_utf8(text);
  TS_CHECK_IO(at == std::string_view::npos, path, ": the byte ",
              detail::byte_name(static_cast<uint8_t>(text[at])), " at offset ",
              at,
              " is not UTF-8. Convert the text, as with iconv -t UTF-8, or "
              "leave the file out, by data.exclude.");
}

class MappedText final : public Documents::Impl {
 public:
  explicit MappedText(MappedFile file) : file_(std::move(file)) {}

  std::optional<std::string_view> next() override {
    if (std::exchange(given_, true)) return std::nullopt;
    check_text(detail::text_of(file_), file_.path());
    return detail::text_of(file_);
  }
  bool stays() const override { return true; }
  std::string place() const override { return file_.path(); }
  uint64_t consumed() const override { return given_ ? file_.size() : 0; }

 private:
  MappedFile file_;
  bool given_ = false;
};

class CompressedText final : public Documents::Impl {
 public:
  explicit CompressedText(MappedFile file)
      : file_(std::move(file)), reader_(detail::open_bytes(file_)) {}

  std::optional<std::string_view> next() override {
    if (std::exchange(given_, true)) return std::nullopt;
    constexpr size_t kPart = size_t{1} << 20;
    constexpr size_t kLongest = size_t{8} << 30;
    for (size_t got = kPart; got == kPart;) {
      const size_t size = text_.size();
      TS_CHECK_IO(size < kLongest, file_.path(), ": unpacked it has more than ",
                  bytes_text(kLongest),
                  ", which would lie in memory at once. Unpack the file: plain "
                  "text is read in parts, as JSON lines are.");
      text_.resize(size + kPart);
      got = reader_->read(std::span(text_).subspan(size));
      text_.resize(size + got);
    }
    check_text(text_, file_.path() + " (unpacked)");
    return text_;
  }
  bool stays() const override { return true; }
  std::string place() const override { return file_.path(); }
  uint64_t consumed() const override { return reader_->consumed(); }

 private:
  MappedFile file_;
  std::unique_ptr<ByteReader> reader_;
  std::string text_;
  bool given_ = false;
};

class RecordTexts final : public Documents::Impl {
 public:
  RecordTexts(const std::string& path, std::string field)
      : records_(path, c10::str("{", tessera::detail::in_quotes(field),
                                ": \"...\"}")),
        field_(std::move(field)) {}

  std::optional<std::string_view> next() override {
    if (!records_.next()) return std::nullopt;
    return records_.text_at(field_);
  }
  std::string place() const override { return records_.place(); }
  uint64_t consumed() const override { return records_.consumed(); }

 private:
  detail::JsonRecords records_;
  std::string field_;
};

std::unique_ptr<Documents::Impl> open(const std::string& path,
                                      const DocumentForm& form) {
  if (form.format == "jsonl" ||
      (form.format == "auto" && has_json_name(path))) {
    return std::make_unique<RecordTexts>(path, form.field);
  }
  MappedFile file(path);
  detail::refuse_foreign(file);
  if (detail::is_compressed(file)) {
    return std::make_unique<CompressedText>(std::move(file));
  }
  return std::make_unique<MappedText>(std::move(file));
}

}  // namespace

bool has_json_name(const std::string& path) {
  return detail::json_name_of(path) != detail::JsonName::kNone;
}

Documents::Documents(const std::string& path, const DocumentForm& form)
    : impl_(open(path, form)) {}
Documents::~Documents() = default;
Documents::Documents(Documents&&) noexcept = default;
Documents& Documents::operator=(Documents&&) noexcept = default;

std::optional<std::string_view> Documents::next() { return impl_->next(); }
bool Documents::stays() const { return impl_->stays(); }
std::string Documents::place() const { return impl_->place(); }
uint64_t Documents::consumed() const { return impl_->consumed(); }

}  // namespace tessera::data
