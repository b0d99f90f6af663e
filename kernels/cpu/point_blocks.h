// Points in blocks of neighbours, and boxes around blocks: what is far is passed over by the box.
//
// Points are split at the median of their widest coordinate until 16 are left, a block, in which
// every coordinate lies side by side for one load. Splits leave a power of two of blocks on the left,
// so blocks 16 i .. 16 i + 15 share a box of the next level, as 16 of these do, and so on: a tree
// without pointers, whose 16 children are compared with a target at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "points.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {

constexpr int64_t BLOCK_POINTS = 16;  // of a block, and children of a box

template <class T>
constexpr int BLOCK_VECTORS = BLOCK_POINTS / Vec<T>::L;

template <class T>
class PointBlocks {
 public:
  // Of equal points only the `copies` of smallest index are sure to stand in blocks.
  PointBlocks(const T* x, int64_t rows, int64_t width, double scale, int64_t copies, int threads)
      : x_(x), width_(width), copies_(copies), order_(finite_rows(x, rows, width)),
        is_left_out_(order_.size()) {
    const auto count = static_cast<int64_t>(order_.size());
    num_blocks_ = (count + BLOCK_POINTS - 1) / BLOCK_POINTS;
    threads = threads_worth(static_cast<double>(count) * (width + 100), threads);
    sort_points(threads);
    lay_out(scale, threads);
    make_boxes();
  }

  int64_t count() const { return static_cast<int64_t>(order_.size()); }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t width() const { return width_; }
  const int32_t* order() const { return order_.data(); }  // of the points that are finite
  const T* rows() const { return rows_.data(); }          // in that order, as they were given
  const T* block(int64_t b) const { return blocks_.data() + b * width_ * BLOCK_POINTS; }
  int levels() const { return static_cast<int>(boxes_.size()); }

  // Of 16 children the least and the largest of each coordinate: [width][2][16].
  const T* box(int level, int64_t group) const {
    return boxes_[static_cast<size_t>(level)].data() + group * width_ * 2 * BLOCK_POINTS;
  }

 private:
  struct Range {
    int64_t first, count;
  };
  struct Key {
    T coordinate;
    int32_t index;
    bool operator<(const Key& other) const {
      return coordinate < other.coordinate ||
             (coordinate == other.coordinate && index < other.index);
    }
  };

  void sort_points(int threads) {
    const int64_t count = static_cast<int64_t>(order_.size());
    std::vector<Range> ranges;
    if (count) ranges.push_back({0, count});
    std::vector<Key> keys(order_.size());
    // Each worker splits whole ranges, of which there are several for each.
    const size_t enough = threads > 1 ? 8 * static_cast<size_t>(threads) : 1;
    while (!ranges.empty() && ranges.size() < enough) {
      std::vector<Range> halves;
      for (const Range& range : ranges) {
        const int64_t left = split(range, keys.data() + range.first);
        halves.push_back({range.first, left});
        if (left < range.count) halves.push_back({range.first + left, range.count - left});
      }
      if (halves.size() == ranges.size()) break;
      ranges.swap(halves);
    }
    parallel_tasks(static_cast<int64_t>(ranges.size()), threads, [&](int64_t task, int) {
      split_all(ranges[static_cast<size_t>(task)], keys.data());
    });
  }

  void split_all(const Range& range, Key* keys) {
    if (range.count <= BLOCK_POINTS) return;
    const int64_t left = split(range, keys + range.first);
    if (left == range.count) return;
    split_all({range.first, left}, keys);
    split_all({range.first + left, range.count - left}, keys);
  }

  // Puts the lower half of a range first; returns how many that are, all where they are equal.
  int64_t split(const Range& range, Key* keys) {
    if (range.count <= BLOCK_POINTS) return range.count;
    int32_t* order = order_.data() + range.first;
    const int64_t axis = widest(order, range.count);
    if (axis < 0) {
      if (range.count > copies_) {
        std::nth_element(order, order + copies_, order + range.count);
        std::fill_n(is_left_out_.begin() + range.first + copies_, range.count - copies_, 1);
      }
      return range.count;
    }
    int64_t left = BLOCK_POINTS;
    while (2 * left < range.count) left *= 2;
    for (int64_t i = 0; i < range.count; ++i) keys[i] = {x_[order[i] * width_ + axis], order[i]};
    std::nth_element(keys, keys + left, keys + range.count);
    for (int64_t i = 0; i < range.count; ++i) order[i] = keys[i].index;
    return left;
  }

  // The coordinate in which some of the points differ most; -1 where all points are equal.
  int64_t widest(const int32_t* order, int64_t count) const {
    constexpr int64_t SOME = 64;
    for (const int64_t step : {std::max<int64_t>(1, count / SOME), int64_t{1}}) {
      T most = 0;
      int64_t found = -1;
      for (int64_t c = 0; c < width_; ++c) {
        T low = x_[order[0] * width_ + c], high = low;
        for (int64_t i = step; i < count; i += step) {
          const T value = x_[order[i] * width_ + c];
          low = std::min(low, value);
          high = std::max(high, value);
        }
        if (low < high && !(high - low <= most && found >= 0)) most = high - low, found = c;
      }
      if (found >= 0 || step == 1) return found;
    }
    return -1;
  }

  void lay_out(double scale, int threads) {
    const int64_t count = static_cast<int64_t>(order_.size());
    rows_.resize(order_.size() * static_cast<size_t>(width_));
    blocks_.resize(static_cast<size_t>(num_blocks_ * BLOCK_POINTS * width_));
    parallel_tasks(num_blocks_, threads, [&](int64_t b, int) {
      T* block = blocks_.data() + b * BLOCK_POINTS * width_;
      for (int64_t lane = 0; lane < BLOCK_POINTS; ++lane) {
        const int64_t place = b * BLOCK_POINTS + lane;
        const bool is_there = place < count && !is_left_out_[static_cast<size_t>(place)];
        for (int64_t c = 0; c < width_; ++c) {
          T value = std::numeric_limits<T>::infinity();  // farther than any limit
          if (place < count) {
            const T given = x_[order_[static_cast<size_t>(place)] * width_ + c];
            rows_[static_cast<size_t>(place * width_ + c)] = given;
            if (is_there) value = static_cast<T>(static_cast<double>(given) * scale);
          }
          block[c * BLOCK_POINTS + lane] = value;
        }
      }
    });
  }

  void make_boxes() {
    constexpr T none = std::numeric_limits<T>::infinity();
    const int64_t W = BLOCK_POINTS;
    int64_t children = num_blocks_;
    for (int level = 0; level == 0 || children > 1; ++level) {
      const int64_t groups = (children + W - 1) / W;
      std::vector<T> boxes(static_cast<size_t>(groups * width_ * 2 * W));
      for (int64_t i = 0; i < groups * W; ++i) {
        for (int64_t c = 0; c < width_; ++c) {
          T low = none, high = -none;
          const T* from = nullptr;
          if (i < children) {
            from = level == 0 ? block(i) + c * W : box(level - 1, i) + 2 * c * W;
            for (int64_t lane = 0; lane < W; ++lane) {
              const T other = level == 0 ? from[lane] : from[W + lane];
              low = std::min(low, from[lane]);
              if (other < none) high = std::max(high, other);
            }
          }
          T* to = boxes.data() + ((i / W * width_ + c) * 2) * W + i % W;
          to[0] = low;
          to[W] = high;
        }
      }
      boxes_.push_back(std::move(boxes));
      children = groups;
    }
  }

  const T* const x_;
  const int64_t width_, copies_;
  std::vector<int32_t> order_;
  std::vector<char> is_left_out_;  // not of bits: written by several threads
  int64_t num_blocks_ = 0;
  std::vector<T> rows_, blocks_;
  std::vector<std::vector<T>> boxes_;
};

}  // namespace graphattn
