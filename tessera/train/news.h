// What a watch tells of, once: that something has become slow, or is no longer.
#pragma once

#include <string>

#include "tessera/core/log.h"

namespace tessera::train {

struct News {
  bool is_bad = false;
  std::string text;
};

inline void tell(const News& news) {
  if (news.is_bad) {
    log::warning(news.text);
  } else {
    log::info(news.text);
  }
}

}  // namespace tessera::train
