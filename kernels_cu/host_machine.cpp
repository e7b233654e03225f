// host_machine.cpp -- what `tile/host.cuh` declares, compiled once for all kernels.
#include "host_block.cpp"
#include <algorithm>
#include <exception>
#include <thread>

namespace host {

struct Copy {
  char* dst;
  const void* src;                                              // null: zeros
  int bytes;
};
struct Store { void* dst; int bytes; char value[LARGEST_STORE]; };
struct Product {
  void* result;
  int bytes;
  std::shared_ptr<char[]> before, sum;                        // those of the product that it adds to, and its own
  Kept<void*> compute;
  void run() const {
    if (before) std::memcpy(sum.get(), before.get(), bytes);
    compute(sum.get());
  }
};

// What a warp has started.
struct Pending {
  std::vector<Copy> open = {};                                // issued, not yet in a group
  std::vector<std::vector<Copy>> groups = {};                 // committed, oldest first
  std::vector<Store> stores = {};
  const char *first_hidden = nullptr, *last_hidden = nullptr; // around what was stored and not shown
  std::vector<Kept<>> async_stores = {};                      // not waited for
  std::vector<std::function<void()>> async_sums = {};         // neither
  std::vector<Product> running = {}, complete = {};           // products, oldest first; complete ones have not been named by a wait

  // Whether a copy that nobody has waited for may still arrive in these bytes.
  bool arrives_in(const char* first, int bytes) const {
    const auto is_there = [=](const Copy& c) { return c.dst < first + bytes && first < c.dst + c.bytes; };
    const auto is_among = [=](const std::vector<Copy>& copies) { return std::any_of(copies.begin(), copies.end(), is_there); };
    return is_among(open) || std::any_of(groups.begin(), groups.end(), is_among);
  }
  // What the registers at `result` will hold when all products started for them are waited for, or null.
  std::shared_ptr<char[]> sum_at(const void* result) const {
    std::shared_ptr<char[]> sum;
    for (const auto* products : {&complete, &running})
      for (const Product& product : *products)
        if (product.result == result) sum = product.sum;
    return sum;
  }
};

static void perform(const Copy& c) {
  if (c.src) std::memcpy(c.dst, c.src, c.bytes);
  else std::memset(c.dst, 0, c.bytes);
}

void Warp::copy_async(void* dst, const void* src, int bytes) {
  const Copy copy{static_cast<char*>(dst), src, bytes};
  if (src) counts.read_bytes += bytes;
  if (block->schedule == EAGER) perform(copy);
  pending->open.push_back(copy);
}
void Warp::commit_copies() { pending->groups.push_back(std::move(pending->open)); pending->open.clear(); }
void Warp::wait_for_copies(int most) {
  for (auto& groups = pending->groups; int(groups.size()) > most; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front())
      if (block->schedule == DEFERRED) perform(copy);
}
void Warp::store_shared(void* dst, const void* value, int bytes) {
  hide(static_cast<const char*>(dst), bytes);
  if (pending->arrives_in(static_cast<const char*>(dst), bytes))
    block->fail(warp, "stores to byte " + std::to_string(static_cast<char*>(dst) - block->shared) +
                          " of shared memory, where a copy that it has not waited for may still arrive");
  if (block->schedule == EAGER) { std::memcpy(dst, value, bytes); return; }
  Store store{dst, bytes, {}};
  std::memcpy(store.value, value, bytes);
  pending->stores.push_back(store);
}
void Warp::publish_stores() {
  for (const Store& s : pending->stores) std::memcpy(s.dst, s.value, s.bytes);
  pending->stores.clear();
}
void Warp::show_stores() {
  publish_stores();
  block->show(warp, pending->first_hidden, pending->last_hidden);
  pending->first_hidden = pending->last_hidden = nullptr;
}
void Warp::store_async(const Task<>& copy) {
  if (block->schedule == EAGER) copy.call(copy.function);
  pending->async_stores.push_back(copy);
}
void Warp::wait_for_async_stores() {
  if (block->schedule == DEFERRED)
    for (const auto& copy : pending->async_stores) copy();
  pending->async_stores.clear();
}
void Warp::add_async(float* to, const char* from, int count, bool first) {
  const auto values = std::make_shared<std::vector<float>>(count);
  store_async([values = values->data(), from, count] { std::memcpy(values, from, count * sizeof(float)); });
  pending->async_sums.push_back([=] {
    counts.read_bytes += count * sizeof(float) * !first;
    counts.written_bytes += count * sizeof(float);
    if (first) std::memcpy(to, values->data(), count * sizeof(float));
    else for (int i = 0; i < count; ++i) add_atomically(to[i], (*values)[i]);
  });
  if (block->schedule == EAGER) pending->async_sums.back()();
}
void Warp::wait_for_async_sums() {
  wait_for_async_stores();
  if (block->schedule == DEFERRED)
    for (const auto& add : pending->async_sums) add();
  pending->async_sums.clear();
}
void Warp::start_product(void* result, int bytes, bool add, const Task<void*>& compute, CallSite at) {
  Product product{result, bytes, pending->sum_at(result), std::shared_ptr<char[]>(new char[bytes]), compute};
  if (product.before && !add) fail("starts a product in place of one that nobody has waited for,", at);
  std::memcpy(product.sum.get(), result, bytes);
  std::memset(result, 0xff, bytes);
  block->do_together(warp);
  if (block->schedule == EAGER) product.run();
  pending->running.push_back(std::move(product));
}
void Warp::wait_for_products(int most, const void* named, CallSite at) {
  auto &running = pending->running, &complete = pending->complete;
  for (; int(running.size()) > most; running.erase(running.begin())) {
    if (block->schedule == DEFERRED) running.front().run();
    complete.push_back(running.front());
  }
  for (const Product& product : running)
    if (product.result == named) fail("waits for a product that may still run", at);
  for (const Product& product : complete)
    if (product.result == named) std::memcpy(product.result, product.sum.get(), product.bytes);
  complete.erase(std::remove_if(complete.begin(), complete.end(), [=](const Product& product) { return product.result == named; }),
                 complete.end());
}
void Warp::counted(const u32& counter) { block->grid.counted(counter); }
void Warp::wait_for(const u32& counter, u32 value, bool or_beyond, CallSite at) { block->wait_for(warp, counter, value, or_beyond, at); }
void Warp::end_early() { throw Stopped{}; }
void Warp::fail(const char* what, CallSite at) { block->fail(warp, what, at); }
void Warp::fail_by_alignment(int bytes, const char* what) {
  block->fail(warp, std::string("hands ") + what + " an address that is no multiple of " + std::to_string(bytes));
}
void Warp::fail_by_box(int rows, int cols, int box_rows, int box_cols, CallSite at) {
  const auto size = [](int rows, int cols) { return std::to_string(rows) + " x " + std::to_string(cols); };
  block->fail(warp, "moves " + size(rows, cols) + " elements with a map of boxes of " + size(box_rows, box_cols), at);
}
void Warp::fail_by_lanes() {
  if (!std::uncaught_exceptions())
    block->fail(warp, "has " + std::to_string(asked % 32) + " of 32 lanes ask for what all of them do together", asked_at);
}
void Warp::check_shown(const char* from, int bytes, const char* who, CallSite at) { block->check_shown(warp, from, bytes, who, at); }
void Warp::start() {
  *pending = {};
  block_id = u32(block->index);
  lane_by_lane = false;
}
void Warp::end() {
  if (!pending->async_stores.empty()) block->fail(warp, "ends while TMA may still read shared memory");
  if (!pending->async_sums.empty()) block->fail(warp, "ends while TMA may still add to sums");
  if (!pending->running.empty()) block->fail(warp, "ends while a product runs");
}
void Warp::hide(const char* dst, int bytes) {
  block->hide(warp, dst, bytes);
  pending->first_hidden = pending->first_hidden ? std::min(pending->first_hidden, dst) : dst;
  pending->last_hidden = std::max(pending->last_hidden, dst + bytes);
}

void sync_block(CallSite at) {
  ask_warp(at);
  self->publish_stores();
  self->block->sync(self->warp, at);
}
void arrive_named(int name, int members) {
  self->publish_stores();
  self->block->arrive_named(name, members);
}
void sync_named(int name, int members, const char* whom, CallSite at) {
  ask_warp(at);
  self->publish_stores();
  self->block->sync_named(self->warp, name, members, whom, at);
}
bool any_named(int name, int members, bool says, const char* whom, CallSite at) {
  ask_warp(at);
  self->publish_stores();
  return self->block->any_named(self->warp, name, members, says, whom, at);
}
void init_mbarrier(int warp, const char* address, int count, CallSite at) { self->block->init_mbarrier(warp, address, count, at); }
void arrive(int warp, const char* address, i64 bytes, CallSite at) { self->block->arrive(warp, address, bytes, at); }
void load_async(int warp, const char* address, i64 bytes, const Task<>& copy, CallSite at) {
  self->block->load_async(warp, address, bytes, copy, at);
}
void wait_for_mbarrier(int warp, const char* address, u32 phase, CallSite at) { self->block->wait_for_mbarrier(warp, address, phase, at); }
void sync_cluster(CallSite at) {
  ask_warp(at);
  self->publish_stores();
  self->block->sync_cluster(self->warp, at);
}
// Places in the shared memory of this block are at as many bytes in that of another one.
static Block& other_block(int rank, const char* what, CallSite at) { return self->block->other_block(self->warp, rank, what, at); }
void arrive_there(int rank, const char* address, CallSite at) {
  Block& there = other_block(rank, "arrives in", at);
  there.arrive(self->warp, there.shared + (address - self->shared), 0, at);
}
void send_async(int rank, char* to, const char* from, int bytes, const char* barrier, CallSite at) {
  Block& there = other_block(rank, "has TMA copy to", at);
  char* const dst = there.shared + (to - self->shared);
  self->check_shown(from, bytes, "has TMA read", at);
  there.check_shown(self->warp, dst, bytes, "has TMA overwrite", at);
  there.load_async(self->warp, there.shared + (barrier - self->shared), bytes, [=] { std::memcpy(dst, from, bytes); }, at);
}
void do_together(int warp) { self->block->do_together(warp); }

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

// Executes the kernel for every block of the grid, of which `cluster` neighbours are one. Teams of `warps` threads, at least so many, take blocks
// in order until none is left, one fails, or somebody sets `stop`. The words of its parameters name arrays in reports. Adds what they moved and
// computed to `counts`. Returns the first failure, or an empty string.
std::string run_grid(const std::function<void()>& kernel, std::vector<u64> params, i64 blocks, int cluster, int warps, int shared_bytes,
                     Schedule schedule, int teams, Counts& counts, int& stop) {
  Grid grid{blocks, std::move(params), stop, cluster};
  teams = std::max(teams, cluster);
  grid.moving = teams;
  for (int i = 0; i < teams; ++i) grid.in_progress.push_back(std::make_unique<Block>(grid, warps, shared_bytes, schedule));

  auto team = [&](Block& block) {
    Meeting meeting(warps);
    i64 current = 0;
    auto member = [&](int id) {
      Pending pending;
      Warp warp;
      warp.block = &block;
      warp.warp = id;
      warp.shared = block.shared;
      warp.blocks = u32(blocks);
      warp.stop = &stop;
      warp.pending = &pending;
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
