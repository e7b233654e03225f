// host_machine.cpp -- what `tile/host.cuh` declares, compiled once for all kernels.
#include "host_block.cpp"
#include <algorithm>
#include <thread>

namespace host {

void Warp::copy_async(void* dst, const void* src, int bytes) {
  if (src) counts.read_bytes += bytes;
  if (block->schedule == EAGER) perform({dst, src, bytes});
  else open.push_back({dst, src, bytes});
}
void Warp::commit_copies() { groups.push_back(std::move(open)); open.clear(); }
void Warp::wait_for_copies(int pending) {
  while (int(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) perform(copy);
    groups.erase(groups.begin());
  }
}
void Warp::store_shared(void* dst, const void* value, int bytes) {
  hide(static_cast<const char*>(dst), bytes);
  if (block->schedule == EAGER) { std::memcpy(dst, value, bytes); return; }
  Store store{dst, bytes, {}};
  std::memcpy(store.value, value, bytes);
  stores.push_back(store);
}
void Warp::publish_stores() {
  for (const Store& s : stores) std::memcpy(s.dst, s.value, s.bytes);
  stores.clear();
}
void Warp::show_stores() {
  publish_stores();
  block->show(warp, first_hidden, last_hidden);
  first_hidden = last_hidden = nullptr;
}
void Warp::store_async(const std::function<void()>& copy) {
  if (block->schedule == EAGER) copy();
  async_stores.push_back(copy);
}
void Warp::wait_for_async_stores() {
  if (block->schedule == DEFERRED)
    for (const auto& copy : async_stores) copy();
  async_stores.clear();
}
void Warp::add_async(float* to, const char* from, int count) {
  const auto values = std::make_shared<std::vector<float>>(count);
  store_async([=] { std::memcpy(values->data(), from, count * sizeof(float)); });
  async_sums.push_back([=] {
    counts.read_bytes += count * sizeof(float);
    counts.written_bytes += count * sizeof(float);
    for (int i = 0; i < count; ++i) add_atomically(to[i], (*values)[i]);
  });
  if (block->schedule == EAGER) async_sums.back()();
}
void Warp::wait_for_async_sums() {
  wait_for_async_stores();
  if (block->schedule == DEFERRED)
    for (const auto& add : async_sums) add();
  async_sums.clear();
}
void Warp::start_product(const Product& product) {
  block->do_together(warp);
  if (block->schedule == EAGER) product.compute();
  running.push_back(product);
}
void Warp::wait_for_products(int pending, const void* named, CallSite at) {
  for (; int(running.size()) > pending; running.erase(running.begin())) {
    if (block->schedule == DEFERRED) running.front().compute();
    complete.push_back(running.front());
  }
  for (const Product& product : running)
    if (product.result == named) fail("waits for a product that may still run", at);
  for (const Product& product : complete)
    if (product.result == named) product.deliver();
  complete.erase(std::remove_if(complete.begin(), complete.end(), [=](const Product& product) { return product.result == named; }),
                 complete.end());
}
std::shared_ptr<void> Warp::sum_at(const void* result) const {
  std::shared_ptr<void> sum;
  for (const auto* products : {&complete, &running})
    for (const Product& product : *products)
      if (product.result == result) sum = product.sum;
  return sum;
}
void Warp::fail(const std::string& what, CallSite at) { block->fail(warp, what, at); }
void Warp::check_shown(const char* from, int bytes, const char* who, CallSite at) { block->check_shown(warp, from, bytes, who, at); }
void Warp::start() {
  open.clear();
  groups.clear();
  stores.clear();
  async_stores.clear();
  async_sums.clear();
  running.clear();
  complete.clear();
  first_hidden = last_hidden = nullptr;
  lane_by_lane = false;
}
void Warp::end() {
  if (!async_stores.empty()) block->fail(warp, "ends while TMA may still read shared memory");
  if (!async_sums.empty()) block->fail(warp, "ends while TMA may still add to sums");
  if (!running.empty()) block->fail(warp, "ends while a product runs");
}
void Warp::hide(const char* dst, int bytes) {
  block->hide(warp, dst, bytes);
  first_hidden = first_hidden ? std::min(first_hidden, dst) : dst;
  last_hidden = std::max(last_hidden, dst + bytes);
}
void Warp::perform(const Copy& c) {
  if (c.src) std::memcpy(c.dst, c.src, c.bytes);
  else std::memset(c.dst, 0, c.bytes);
}

// All warps of a team meet between two blocks of the grid.
struct Meeting {
  explicit Meeting(int members) : members(members) {}
  template <typename Last> void wait(Last last) {
    std::unique_lock<std::mutex> lock(mutex);
    const u64 mine = round;
    if (++here == members) { here = 0; last(); ++round; wake.notify_all(); return; }
    while (round == mine) wake.wait(lock);
  }
 private:
  std::mutex mutex;
  std::condition_variable wake;
  const int members;
  int here = 0;
  u64 round = 0;
};

std::string run_grid(const std::function<void()>& kernel, std::vector<u64> params, i64 blocks, int warps, int shared_bytes, Schedule schedule,
                     int teams, Counts& counts, int& stop) {
  Grid grid{blocks, std::move(params), stop};
  grid.moving = teams;
  for (int i = 0; i < teams; ++i) grid.in_progress.push_back(std::make_unique<Block>(grid, warps, shared_bytes, schedule));

  auto team = [&](Block& block) {
    Meeting meeting(warps);
    i64 current = 0;
    auto member = [&](int id) {
      Warp warp;
      warp.block = &block;
      warp.warp = id;
      self = &warp;
      for (;;) {
        meeting.wait([&] {
          if (!block.failure.empty() || grid.stopped()) grid.end(block.failure);
          current = grid.stopped() ? blocks : grid.next++;
          if (current < blocks) block.start(current);
          else grid.rest();
        });
        if (current >= blocks) {
          std::lock_guard<std::mutex> lock(grid.mutex);
          counts += warp.counts;
          return;
        }
        warp.start();
        try {
          kernel();
          warp.end();
        } catch (const Stopped&) {}
        block.leave(id);
      }
    };
    std::vector<std::thread> others;
    for (int id = 1; id < warps; ++id) others.emplace_back(member, id);
    member(0);
    for (std::thread& t : others) t.join();
  };

  std::vector<std::thread> more;
  for (int i = 1; i < teams; ++i) more.emplace_back(team, std::ref(*grid.in_progress[i]));
  team(*grid.in_progress[0]);
  for (std::thread& t : more) t.join();
  return grid.failure;
}

}  // namespace host
