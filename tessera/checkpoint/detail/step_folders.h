// The folders DIR/step-N of a run: how one comes and how it goes.
//
// Nothing is ever changed inside a step-N: it appears whole by a rename, and
// goes by a rename to step-N.tmp before its files are removed. What ends in
// .tmp is never read, and removed by the next save.
// Errors: TS_CHECK_IO with path and reason.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::checkpoint::detail {

// "step-12".
std::string step_name(int64_t step);
// The step of "step-12"; none for any other name, "step-012" included.
std::optional<int64_t> step_of_name(const std::string& name);
// Of what an interrupted save, or removal, left.
bool is_leftover(const std::string& name);
// "step-12" of "runs/a/step-12/".
std::string last_part(const std::string& path);

// What cannot be removed, as files that are still read over a network, stays,
// and is told.
void remove_leftovers(const std::string& folder);
// The bytes on disk that this would give back; 0 where there is no folder.
int64_t bytes_of_leftovers(const std::string& folder);

// Makes `temporary` the checkpoint of `step`, durably. One of that step that is
// there already is replaced as a whole, and stays where that fails.
void commit_step(const std::string& folder, const std::string& temporary,
                 int64_t step);

// In the file `latest`.
void name_latest(const std::string& folder, int64_t step);

// In two steps: a folder set aside is no checkpoint any more.
void remove_step(const std::string& folder, int64_t step);
void set_step_aside(const std::string& folder, int64_t step);
void remove_set_aside(const std::string& folder, int64_t step);

}  // namespace tessera::checkpoint::detail
