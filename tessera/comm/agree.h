// Ranks that reach one verdict together.
//
// A rank alone may find a bad file or a full disk; if it alone threw, the
// others would wait for it for ever. So each catches what went wrong, all
// exchange it, and all throw, or go on, alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

// What `work` complained of (the message of a tessera::Error, of the standard
// library's system errors or of a failed allocation); "" if of nothing.
std::string complaint_of(const std::function<void()>& work);

// The complaint of the first rank that has one, the same on every rank; ""
// where none has. Cut to 4 KiB.
// Comm: one all_reduce, and one broadcast where there is a complaint.
std::string first_complaint(Group& group, const std::string& complaint);

// first_complaint() of `work`, which may take longer on one rank than the group
// waits: until all are done ranks meet now and then, and rank 0 shows once a
// minute who is still at it. `doing`: "saving step 40". Nothing else may use
// the group meanwhile. Work that never ends is never given up.
// Comm: an all_reduce at each meeting, and first_complaint()'s.
std::string first_complaint_of(Group& group, const std::string& doing,
                               const std::function<void()>& work);

// `work` of every rank, which may take longer on one than the group waits.
// Where one fails all do: with what its own work threw, or with the code and in
// the words of the first that failed, which it names. Comm: as
// first_complaint_of().
void on_all(Group& group, const std::string& doing,
            const std::function<void()>& work);

// Work of the group's first rank, on a disk that may be slow, while the others
// wait; what it complains of is TS_CHECK_IO on all of them. Comm: as
// first_complaint_of().
void on_first(Group& group, const std::string& doing,
              const std::function<void()>& work);

// The texts of all ranks on rank 0, in order of rank; empty on the others.
// Comm: two sends from every other rank.
std::vector<std::string> gather_texts(Group& group, const std::string& text);

// `work` on one rank after the other, in their order: for what ranks that are
// threads share, as torch's random numbers. Comm: a barrier a rank.
void in_turn(Group& group, const std::function<void()>& work);

// Rank 0's text, or that of another rank of the group, on every rank. Comm: two
// broadcasts.
std::string text_of_rank_0(Group& group, const std::string& text);
std::string text_of(Group& group, int64_t rank, const std::string& text);

// Rank 0's numbers, on every rank. Comm: two broadcasts.
std::vector<int64_t> numbers_of_rank_0(Group& group,
                                       std::vector<int64_t> numbers);

}  // namespace tessera::comm
