// The training and validation sets of a run, from the configuration's paths.
//
// Text gets the tokenizer of data.tokenizer, else the one of model.from, else
// one that is trained on the training text, with model.vocab tokens. The run
// folder keeps the tokenizer; tokenized text lies beside the runs, for all that
// have the same tokenizer and files.
// Entries of data.train are one source, or with data.weights one each.
//
// Use:    prepare_data() once, by one rank or before there are ranks; then
//         open_datasets() on every rank, which says what each source has.
// Comm:   open_datasets(): two gathers, and where some ranks read for others
//         two broadcasts of what they have to know.
// Errors: as data/token_stream.h and data/dataset.h.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/data/fingerprint.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/run_config.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

struct Datasets {
  std::unique_ptr<data::Dataset> train;
  std::unique_ptr<data::Dataset> valid;  // nullptr: none was asked for
  bool reads = true;                     // else another rank does, for this one
  // Of every file that this rank reads.
  std::vector<data::FileFingerprint> fingerprints;
};

// Idempotent: what is there already is not made again.
void prepare_data(const engine::RunConfig& config, const RunFolder& folder);

// For who talks to the model of this run: the template that it is trained with,
// and the special tokens that the template names.
void keep_chat_template(const engine::RunConfig& config,
                        const RunFolder& folder);

// That of the run's text or, of token files of which something has to be known
// (data.intra_document_masking, monitor.sample), the one that is given; none:
// there is none. REQUIRES: prepare_data().
std::optional<data::Tokenizer> find_tokenizer(const engine::RunConfig& config,
                                              const RunFolder& folder);

// TS_CHECK_IO on every rank where two that read have other files.
Datasets open_datasets(const engine::RunConfig& config, const RunFolder& folder,
                       comm::Group& world);

}  // namespace tessera::train
