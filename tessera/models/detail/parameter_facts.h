// Facts of a unit's parameters: what ZeRO holds, gathers and reduces of them.
#pragma once

#include <vector>

#include "tessera/models/facts.h"

namespace tessera::models::detail {

std::vector<program::ParameterFacts> parameter_facts(
    const std::vector<PlacedParameter>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const FactsOptions& options);

}  // namespace tessera::models::detail
