// Says every few seconds how far a long work is, and how long it will take.
#pragma once

#include <functional>
#include <string>

namespace tessera::data::detail {

class Progress {
 public:
  // `clock`: seconds; empty: a steady clock.
  explicit Progress(std::string what, std::function<double()> clock = {});

  // `words`: of what is done, as "3 MiB of 12 MiB"; asked for where a line is
  // due.
  void tell(double done, double total,
            const std::function<std::string()>& words);
  double seconds() const;

 private:
  std::string what_;
  std::function<double()> clock_;
  double start_, told_;
};

}  // namespace tessera::data::detail
