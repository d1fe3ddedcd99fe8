#include "device_area.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

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

// Hosts, what they say, and their counts: two all-to-alls of each rank.
int64_t DeviceArea::host_bytes(int size) {
  const int64_t of_counts = 2 * 2 * size * static_cast<int64_t>(sizeof(int64_t));
  return to_pages(size * (static_cast<int64_t>(sizeof(Host) + kAhead * sizeof(Said)) + of_counts));
}

int64_t DeviceArea::bytes_for(int size, int64_t all_slots) {
  return host_bytes(size) + to_pages(size * sizeof(Words)) + size * kSlots * piece_bytes(size, all_slots);
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
  return memory_ + to_pages(size_ * sizeof(Words)) + (rank * kSlots + piece % kSlots) * slot_bytes_;
}

DeviceArea::Words& DeviceArea::words(int rank) const { return reinterpret_cast<Words*>(memory_)[rank]; }

DeviceArea::Host& DeviceArea::host(int rank) const { return reinterpret_cast<Host*>(start_)[rank]; }

DeviceArea::Said& DeviceArea::said(int rank, uint32_t turn) const {
  auto* const all = reinterpret_cast<Said*>(start_ + size_ * sizeof(Host));
  return all[rank * kAhead + turn % kAhead];
}

int64_t* DeviceArea::counts(int rank, uint32_t number) const {
  auto* const all = reinterpret_cast<int64_t*>(&said(0, 0) + size_ * kAhead);
  return all + (number % 2 * size_ + rank) * 2 * size_;
}

void DeviceArea::say_counts(int rank, uint32_t number) {
  host(rank).counted.store(number + 1, std::memory_order_release);
}

bool DeviceArea::has_counts(int rank, uint32_t number) const {
  return reached(host(rank).counted.load(std::memory_order_acquire), number + 1);
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

void DeviceArea::end_waits(uint32_t last_piece) {
  for (int rank = 0; rank < size_; ++rank)
    for (uint32_t* word : {&words(rank).put, &words(rank).summed, &words(rank).done})
      if (!reached(value(*word), last_piece))
        std::atomic_ref<uint32_t>(*word).store(last_piece, std::memory_order_release);
}

}  // namespace oases
