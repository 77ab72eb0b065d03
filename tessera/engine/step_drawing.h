// A planned step, and a traced one, as rows of a drawing: a stage each.
#pragma once

#include <string>

#include "tessera/engine/step_plan.h"
#include "tessera/monitor/report/drawing.h"

namespace tessera::engine {

// "33 forwards", "12.5ms": of a plan's unit.
std::string amount(double time, const std::string& unit);

// Of steps that go on without a flush all that the plan has, or `one_step`, as
// a traced one is drawn.
monitor::report::Panel panel_of(const StepPlan& plan, bool one_step = false);
// Of the same stages, as they ran: the traced step of median length.
monitor::report::Panel panel_of(const TracedRanks& traced,
                                const StepPlan& plan);

}  // namespace tessera::engine
