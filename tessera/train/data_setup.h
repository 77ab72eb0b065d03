// The training and validation sets of a run, from the configuration's paths.
//
// Text gets the tokenizer of data.tokenizer, else the one of model.from, else
// that of the checkpoint which the run goes on from, else one that is trained
// on the training text, with model.vocab tokens. The run folder keeps the
// tokenizer; tokenized text, and a tokenizer that is trained, lie beside the
// runs, for all that have the same tokenizer and files.
// Entries of data.train are one source, or with data.weights one each.
//
// Use:    prepare_data() once, by one rank or before there are ranks; then
//         open_datasets() on every rank, which says what each source has; then
//         keep_tokenizer(), once nothing refuses the run.
// Comm:   open_datasets(): comm::on_all() while files are read, three gathers,
//         and where some ranks read for others two broadcasts of what they have
//         to know.
// Errors: as data/token_stream.h and data/dataset.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/data/fingerprint.h"
#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

struct Datasets {
  std::unique_ptr<data::Dataset> train;
  std::unique_ptr<data::Dataset> valid;  // nullptr: none was asked for
  bool reads = true;                     // else another rank does, for this one
  // Of every file that this rank reads to train on, and their tokenizer.
  std::vector<data::FileFingerprint> fingerprints;
  std::vector<data::FileFingerprint> caches;  // of their tokens, where text is
  // As prepare_data() gives it back; "" on a rank that does not read.
  std::string tokenizer;
};

// Where the tokenizer lies: that of text or, of token files, the one that is
// given; "": there is none. Nothing in the run folder changes. `resume` is
// TrainOptions::resume, here and below. TS_CHECK_CONFIG where text needs the
// tokenizer of a checkpoint that has none. Idempotent: tokens that are there
// already are not made again.
std::string prepare_data(const engine::RunConfig& config,
                         const RunFolder& folder, const std::string& resume);

// Makes the tokenizer that lies at `path` the run's own, with what lies beside
// it for who talks to the model: the special tokens that tokenizer_config.json
// names, and the template, or the one that data.chat_template names. What the
// folder has of an earlier one goes. "": nothing changes.
void keep_tokenizer(const engine::RunConfig& config, const std::string& path,
                    const RunFolder& folder);

// TS_CHECK_IO on every rank where two that read have other files, or other
// tokens of them.
Datasets open_datasets(const engine::RunConfig& config, const RunFolder& folder,
                       const std::string& resume, comm::Group& world);

}  // namespace tessera::train
