// dualpipe_v: two chunks a rank in a V, into which micro-batches go forward
// while others come back: DualPipe cut in half. Most backwards are whole, in
// one turn with a forward that could run beside them; at the ends they come in
// parts. From 2 p micro-batches on, and where a chunk's tf, tb and tw are
// equal, a rank waits (p - 1)(tfb + tb - 2 tw) between its first and its last
// task, if such a turn takes tfb and nothing of it goes on before its end; one
// task behind the other (p - 1) tb. 2 p + 1 chunks' micro-batches are alive.
// Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe (DualPipeV).
#pragma once

#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

std::vector<Turn> dualpipe_v(const Shape& shape, int64_t stage);

// The order that both of DualPipe's forms share, of rank `s` of p, where m
// micro-batches come in each of two directions: 0, which enters first, and 1,
// which are the chunks of these tasks.
std::vector<Turn> in_two_directions(int64_t p, int64_t s, int64_t m);

}  // namespace tessera::program::schedules
