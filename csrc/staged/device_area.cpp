#include "device_area.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "stream_words.h"

namespace oases {
namespace {

constexpr int64_t kPage = 4096;
// Bytes of a slot at least and at most. Copies of less than a megabyte do not reach the rate of the bus.
constexpr int64_t kLeastPiece = 64 << 10, kMostPiece = 2 << 20;

int64_t to_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

int64_t DeviceArea::piece_bytes(int size, int64_t all_slots) {
  return std::clamp(all_slots / (kSlots * size) / kLeastPiece * kLeastPiece, kLeastPiece, kMostPiece);
}

// Hosts, what they say, and their counts of all-to-alls.
int64_t DeviceArea::host_bytes(int size) {
  const int64_t of_counts = kAllToAllsAhead * 2 * size * static_cast<int64_t>(sizeof(int64_t));
  return to_pages(size * (static_cast<int64_t>(sizeof(Host) + kAhead * sizeof(Said)) + of_counts));
}

// A rank's words for all others, which no other rank writes, in lines of the cache of their own.
int64_t DeviceArea::pair_bytes(int size) { return (size * int64_t{sizeof(uint32_t)} + 63) / 64 * 64; }

int64_t DeviceArea::bytes_for(int size, int64_t all_slots) {
  const int64_t words = size * (static_cast<int64_t>(sizeof(Words)) + 2 * pair_bytes(size));
  return host_bytes(size) + to_pages(words) + size * kSlots * piece_bytes(size, all_slots);
}

DeviceArea::DeviceArea(std::byte* start, std::vector<int> ranks, int64_t all_slots)
    : ranks_(std::move(ranks)),
      size_(static_cast<int>(ranks_.size())),
      slot_bytes_(piece_bytes(size_, all_slots)),
      bytes_(bytes_for(size_, all_slots)),
      start_(start),
      memory_(start + host_bytes(size_)) {}

int64_t DeviceArea::memory_bytes() const { return bytes_ - (memory_ - start_); }

std::byte* DeviceArea::slot(int rank, uint32_t piece) const {
  return start_ + bytes_ - (size_ * kSlots - (rank * kSlots + piece % kSlots)) * slot_bytes_;
}

DeviceArea::Words& DeviceArea::words(int rank) const { return reinterpret_cast<Words*>(memory_)[rank]; }

uint32_t* DeviceArea::pair_words(int row) const {
  return reinterpret_cast<uint32_t*>(memory_ + size_ * sizeof(Words) + row * pair_bytes(size_));
}

DeviceArea::Host& DeviceArea::host(int rank) const { return reinterpret_cast<Host*>(start_)[rank]; }

DeviceArea::Said& DeviceArea::said(int rank, uint32_t turn) const {
  auto* const all = reinterpret_cast<Said*>(start_ + size_ * sizeof(Host));
  return all[rank * kAhead + turn % kAhead];
}

int64_t* DeviceArea::counts(int rank, uint32_t number) const {
  auto* const all = reinterpret_cast<int64_t*>(&said(0, 0) + size_ * kAhead);
  return all + (number % kAllToAllsAhead * size_ + rank) * 2 * size_;
}

bool DeviceArea::may_say_counts(uint32_t number) const {
  for (int rank = 0; rank < size_; ++rank)
    if (!reached(host(rank).counts_compared.load(std::memory_order_acquire), number + 1 - kAllToAllsAhead))
      return false;
  return true;
}

void DeviceArea::say_counts(int rank, uint32_t number, const std::vector<int64_t>& sent,
                            const std::vector<int64_t>& received) {
  int64_t* const own = counts(rank, number);
  std::copy(sent.begin(), sent.end(), own);
  std::copy(received.begin(), received.end(), own + size_);
  host(rank).counted.store(number + 1, std::memory_order_seq_cst);  // before the others' are read
}

std::string DeviceArea::compare_counts(int rank, uint32_t number) {
  std::string found;
  for (int other = 0; other < size_ && found.empty(); ++other) {
    if (!reached(host(other).counted.load(std::memory_order_seq_cst), number + 1)) continue;
    for (const auto& [from, to] : {std::pair{rank, other}, std::pair{other, rank}}) {
      const int64_t sends = counts(from, number)[to], takes = counts(to, number)[size_ + from];
      if (sends != takes && found.empty())
        found = c10::str("rank ", ranks_[from], " sends ", sends, " bytes to rank ", ranks_[to],
                         ", which receives ", takes, "; give both the same splits");
    }
  }
  host(rank).counts_compared.store(number + 1, std::memory_order_release);
  return found;
}

bool DeviceArea::may_say(uint32_t turn) const {
  for (int rank = 0; rank < size_; ++rank)
    if (!reached(host(rank).compared.load(std::memory_order_acquire), turn + 1 - kAhead)) return false;
  return true;
}

void DeviceArea::say(int rank, uint32_t turn, const Description& description, const std::string& reason) {
  Said& own = said(rank, turn);
  own.description = description;
  if (!reason.empty()) std::snprintf(host(rank).reason, kReason, "%s", reason.c_str());
  own.turns.store(turn + 1, std::memory_order_seq_cst);  // before the others' are read
}

std::string DeviceArea::compare(int rank, uint32_t turn) {
  const Description& own = said(rank, turn).description;
  std::string found;
  for (int other = 0; other < size_ && found.empty(); ++other) {
    const Said& theirs = said(other, turn);
    if (theirs.turns.load(std::memory_order_seq_cst) != turn + 1 || alike(theirs.description, own)) continue;
    for (const int refused : {rank, other})
      if (said(refused, turn).description.collective == kRefused)
        found = c10::str("rank ", ranks_[refused], " was refused its call: ", host(refused).reason);
    if (found.empty())
      found = rank < other ? difference(own, ranks_[rank], theirs.description, ranks_[other])
                           : difference(theirs.description, ranks_[other], own, ranks_[rank]);
  }
  host(rank).compared.store(turn + 1, std::memory_order_release);
  return found;
}

void DeviceArea::poison() { std::memset(slot(0, 0), 0xff, size_ * kSlots * slot_bytes_); }

void DeviceArea::end_waits(uint32_t last_piece, int rank, const Pairs& pairs) {
  const auto raise = [](uint32_t* word, uint32_t piece) {
    if (!reached(value(*word), piece))
      std::atomic_ref<uint32_t>(*word).store(piece, std::memory_order_release);
  };
  for (int other = 0; other < size_; ++other) {
    for (uint32_t* word : {&words(other).put, &words(other).summed, &words(other).done})
      raise(word, last_piece);
    if (other == rank) continue;
    raise(given(other, rank), pairs.taken[other]), raise(taken(other, rank), pairs.given[other]);
  }
}

}  // namespace oases
