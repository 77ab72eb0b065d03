#pragma once

struct __half;  // NOLINT
