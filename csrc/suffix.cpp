#include "suffix.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace obole {

namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int32_t kGap = -1;       // between two documents
constexpr int64_t kCompared = 16;  // branches of one state that a match looks at: each may be a miss of the cache

}  // namespace

Block allocate_block(int64_t bytes) {
    const int64_t align = bytes >= 2 * kHugePage ? kHugePage : 64;
    const int64_t size = std::max(align, (bytes + align - 1) / align * align);
    void* p = std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(size));
    if (!p) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == kHugePage) madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);  // what is read lies all over it
#endif
    return Block(static_cast<uint8_t*>(p), [](uint8_t* q) { std::free(q); });
}

// The home of an edge grows with its hash, whatever the size of the table, so both tables are gone through in order.
std::vector<int32_t> EdgeTable::grow(int64_t more) {
    const int64_t slots = std::max({(used_ + more) * 5 / 4 + 1, edges_.size() * 5 / 4, int64_t{16}});
    if (slots > INT32_MAX) throw std::length_error("a suffix index has too many transitions");
    EdgeTable wider;
    wider.edges_.fill(slots, Edge{-1, -1, 0, -1});
    std::vector<int32_t> moved(static_cast<size_t>(edges_.size()), -1);
    for (int64_t i = 0; i < edges_.size(); ++i) {
        if (edges_[i].state < 0) continue;
        const int64_t to = wider.slot(edges_[i].state, edges_[i].token);
        wider.put(to, edges_[i]);
        moved[static_cast<size_t>(i)] = static_cast<int32_t>(to);
    }
    for (int64_t i = 0; i < wider.edges_.size(); ++i)
        if (int32_t& next = wider.edges_[i].next; next >= 0) next = moved[static_cast<size_t>(next)];
    *this = std::move(wider);
    return moved;
}

SuffixIndex::SuffixIndex(int64_t counted, int64_t limit) : counted_(counted), limit_(limit) {
    if (counted < 1) throw std::invalid_argument("counted must be at least 1");
    if (limit < 1 || limit > kLimit) throw std::invalid_argument("limit must be from 1 to " + std::to_string(kLimit));
    states_.push(State{0, -1, 0, 0, 1, -1, 0, -1, 0});
    make_room(1);
}

void SuffixIndex::begin() {
    if (text_.size() && text_[text_.size() - 1] != kGap) text_.push(kGap);
    end_ = 0;
}

void SuffixIndex::append(int32_t token) {
    if (states_.size() + 2 > limit_ || text_.size() + 2 > limit_)
        throw std::length_error("the suffix index is full: its limit is " + std::to_string(limit_) + " states and tokens");
    const int32_t before = end_;
    end_ = enter(before, token);
    states_[end_].prefix = 1;
    text_.push(token);
    ++tokens_;
    tally(before, static_cast<int32_t>(text_.size() - 1));
}

void SuffixIndex::extend(const int32_t* tokens, int64_t n) {
    text_.ensure(n);
    for (int64_t i = 0; i < n; ++i) append(tokens[i]);
}

int64_t SuffixIndex::resume(const int32_t* tokens, int64_t n) {
    int32_t state = 0;
    int64_t found = 0;
    while (found < n) {
        const int32_t next = target(state, tokens[found]);
        if (!next || states_[next].len != found + 1 || !states_[next].prefix) break;
        state = next;
        ++found;
    }
    if (state != end_) {
        begin();
        end_ = state;
    }
    extend(tokens + found, n - found);
    return found;
}

bool SuffixIndex::match(int64_t most, Match& match) const {
    return describe(end_, states_[end_].len, most, true, match);
}

// The state that `state` leads to by `token`; 0 if none.
int32_t SuffixIndex::target(int32_t state, int32_t token) const {
    const State& s = states_[state];
    if (s.token == token) return s.target;
    if (s.more < 0) return 0;
    return edges_[edges_.slot(state, token)].target;
}

void SuffixIndex::make_room(int64_t edges) {
    if (edges_.has_room(edges)) return;
    const std::vector<int32_t> moved = edges_.grow(edges);
    for (int64_t i = 0; i < states_.size(); ++i)
        if (int32_t& more = states_[i].more; more >= 0) more = moved[static_cast<size_t>(more)];
}

// `token` must not lead anywhere from `state` yet.
void SuffixIndex::add_edge(int32_t state, int32_t token, int32_t target) {
    State& s = states_[state];
    if (!s.target) {
        s.token = token;
        s.target = target;
        return;
    }
    make_room(1);
    if (s.more < 0) s.best = s.target;
    const int64_t slot = edges_.slot(state, token);
    edges_.put(slot, {state, token, target, s.more});
    s.more = static_cast<int32_t>(slot);
}

void SuffixIndex::redirect(int32_t state, int32_t token, int32_t from, int32_t to) {
    State& s = states_[state];
    if (s.best == from) s.best = to;
    if (s.token == token)
        s.target = to;
    else
        edges_[edges_.slot(state, token)].target = to;
}

int32_t SuffixIndex::add_state(const State& state) {
    states_.push(state);
    return static_cast<int32_t>(states_.size() - 1);
}

// Some of the strings of `old` now end where its longest does not: those made of a suffix of `state` and `token` get a state of
// their own, the one returned.
int32_t SuffixIndex::split(int32_t state, int32_t token, int32_t old) {
    State copy = states_[old];
    copy.len = states_[state].len + 1;
    copy.prefix = 0;
    int64_t edges = 0;
    for (int32_t i = copy.more; i >= 0; i = edges_[i].next) ++edges;
    make_room(edges);
    const int32_t made = add_state(copy);
    int32_t* tail = &states_[made].more;
    for (int32_t i = states_[old].more; i >= 0; i = edges_[i].next) {
        const EdgeTable::Edge edge = edges_[i];
        const int64_t slot = edges_.slot(made, edge.token);
        edges_.put(slot, {made, edge.token, edge.target, -1});
        *tail = static_cast<int32_t>(slot);
        tail = &edges_[slot].next;
    }
    states_[old].link = made;
    for (; state >= 0 && target(state, token) == old; state = states_[state].link) redirect(state, token, old, made);
    return made;
}

// The state of the string that is the longest of `state` and `token`, made if need be, and all of whose suffixes are there.
int32_t SuffixIndex::enter(int32_t state, int32_t token) {
    const auto exact = [&](int32_t from, int32_t to) {
        return states_[to].len == states_[from].len + 1 ? to : split(from, token, to);
    };
    if (const int32_t known = target(state, token)) return exact(state, known);
    const int32_t made = add_state({states_[state].len + 1, 0, 0, 0, 0, -1, 0, -1, 0});
    for (; state >= 0; state = states_[state].link) {
        if (const int32_t known = target(state, token)) {
            const int32_t link = exact(state, known);
            states_[made].link = link;
            break;
        }
        add_edge(state, token, made);
    }
    return made;
}

// The strings of `end_` and of the classes it links to have occurred once more. The states that lead to them are `before` and
// those that it links to, in the same order.
void SuffixIndex::tally(int32_t before, int32_t position) {
    int64_t sources = 2 * counted_;
    int32_t from = before;
    int64_t left = counted_;
    for (int32_t to = end_; to > 0 && left > 0; to = states_[to].link, --left) {
        State& s = states_[to];
        ++s.count;
        s.last = position;
        const int32_t shortest = states_[s.link].len;  // source
        for (; from >= 0 && states_[from].len >= shortest && sources > 0; from = states_[from].link, --sources) {
            State& source = states_[from];
            if (source.more >= 0 && source.best != to && states_[source.best].count <= s.count) source.best = to;
        }
    }
}

bool SuffixIndex::describe(int32_t state, int64_t length, int64_t most, bool own, Match& match) const {
    for (; state > 0 && !states_[state].target; state = states_[state].link, length = states_[state].len) {}
    if (state <= 0) return false;
    match.length = length;
    const int32_t best = compare_branches(states_[state], own ? 1 : 0, match);
    match.support = states_[best].count;
    copy_text(states_[best].last, most, own, match.tokens);
    return true;
}

// Fills in the branches and their total, and returns the target of the best. `ends`: occurrences that nothing follows yet.
int32_t SuffixIndex::compare_branches(const State& state, int64_t ends, Match& match) const {
    int32_t targets[Match::kBranches];
    int n = 0;
    const auto better = [&](int32_t a, int32_t b) {
        const State &x = states_[a], &y = states_[b];
        return x.count != y.count ? x.count > y.count : x.last > y.last;
    };
    const auto look_at = [&](int32_t token, int32_t target) {
        match.total += states_[target].count;
        int i = n < Match::kBranches ? n++ : Match::kBranches;
        for (; i > 0 && better(target, targets[i - 1]); --i) {
            if (i == Match::kBranches) continue;
            targets[i] = targets[i - 1];
            match.branches[i] = match.branches[i - 1];
        }
        if (i == Match::kBranches) return;
        targets[i] = target;
        match.branches[i] = {token, static_cast<int32_t>(states_[target].count)};
    };
    look_at(state.token, state.target);
    bool seen = state.more < 0 || state.best == state.target;
    int32_t edge = state.more;
    for (int64_t left = kCompared - 1; edge >= 0 && left > 0; edge = edges_[edge].next, --left) {
        look_at(edges_[edge].token, edges_[edge].target);
        seen = seen || edges_[edge].target == state.best;
    }
    if (edge >= 0) {
        if (!seen) look_at(text_[states_[state.best].last], state.best);
        match.total = std::max<int64_t>(match.total, state.count - ends);
    }
    match.num_branches = n;
    return targets[0];
}

// The text from a position to the end of its document. If that is the document being written, it goes on to repeat itself.
void SuffixIndex::copy_text(int64_t from, int64_t most, bool own, std::vector<int32_t>& out) const {
    const int64_t written = text_.size() - from;
    out.reserve(static_cast<size_t>(own ? most : std::min(most, written)));
    for (int64_t i = 0; i < most; ++i) {
        if (i >= written && !own) return;
        const int32_t token = i < written ? text_[from + i] : out[static_cast<size_t>(i - written)];
        if (token == kGap) return;
        out.push_back(token);
    }
}

void SuffixCursor::advance(int32_t token) {
    settle();
    int32_t next = index_->target(state_, token);
    while (!next && state_ > 0) {
        state_ = index_->states_[state_].link;
        length_ = index_->states_[state_].len;
        next = index_->target(state_, token);
    }
    if (!next) return;
    state_ = next;
    ++length_;
}

bool SuffixCursor::match(int64_t most, Match& match) {
    settle();
    return index_->describe(state_, length_, most, false, match);
}

// The state of the string may have been split since, and the string be one of the shorter ones.
void SuffixCursor::settle() {
    while (state_ > 0 && length_ <= index_->states_[index_->states_[state_].link].len) state_ = index_->states_[state_].link;
}

}  // namespace obole
