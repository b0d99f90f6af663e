// The edges of a graph that count, a run of them at a time, sample after sample and row after row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "consensus.h"

namespace graphattn {

struct Edge {
  int64_t sample, target, source;
  int64_t place;  // in the list of all edges, row after row
};

class EdgeWalk {
 public:
  explicit EdgeWalk(const ConsensusCall& call) : call_(call) { enter_row(); }

  // The next edges, at most so many; none at the end.
  void next(int64_t most, std::vector<Edge>& found) {
    found.clear();
    while (b_ < call_.batch && static_cast<int64_t>(found.size()) < most) {
      if (at_ == end_) {
        leave_row();
        continue;
      }
      const int64_t room = most - static_cast<int64_t>(found.size());
      const int64_t stop = std::min(end_, at_ + room);
      const uint8_t* valid =
          call_.valid_sources ? call_.valid_sources + b_ * call_.sources : nullptr;
      for (; at_ < stop; ++at_) {
        const int64_t j = call_.rowptr ? call_.source[at_] : i_ + call_.moves[at_];
        if ((valid && !valid[j]) || (call_.energy && i_ == j)) continue;
        found.push_back({b_, i_, j, before_ + at_});
      }
    }
  }

  // How many there are at most.
  int64_t count() const {
    if (call_.rowptr) return call_.batch * call_.rowptr[call_.targets];
    return call_.batch * call_.targets * call_.move_count;
  }

 private:
  void leave_row() {
    if (++i_ >= call_.targets) {
      i_ = sequence_ = first_ = 0;
      ++b_;
    }
    enter_row();
  }

  // Where the sources of target i stand: in the list, or as moves.
  void enter_row() {
    at_ = end_ = 0;
    if (b_ >= call_.batch || i_ >= call_.targets) return;
    if (call_.rowptr) {
      at_ = call_.rowptr[i_], end_ = call_.rowptr[i_ + 1];
    } else {
      find_moves();
    }
    if (call_.valid_targets && !call_.valid_targets[b_ * call_.targets + i_]) at_ = end_;
  }

  // The moves that stay in the sequence of target i.
  void find_moves() {
    if (i_ == 0) listed_ = 0;
    while (sequence_ < call_.border_count && call_.borders[sequence_] <= i_) {
      first_ = call_.borders[sequence_++];
    }
    const int64_t last = sequence_ < call_.border_count ? call_.borders[sequence_] : call_.sources;
    const int64_t *begin = call_.moves, *end = call_.moves + call_.move_count;
    at_ = std::lower_bound(begin, end, first_ - i_) - begin;
    end_ = std::max(at_, std::lower_bound(begin, end, last - i_) - begin);
    before_ = listed_ - at_;
    listed_ += end_ - at_;
  }

  const ConsensusCall& call_;
  int64_t b_ = 0, i_ = 0;           // sample and target
  int64_t sequence_ = 0, first_ = 0;  // borders up to i; where its sequence begins
  int64_t at_ = 0, end_ = 0;          // of its row, in the list or among the moves
  int64_t listed_ = 0, before_ = 0;   // moves: edges up to the row, and those before it less at_
};

}  // namespace graphattn
