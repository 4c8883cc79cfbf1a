// Package topkeys finds the keys that make up most of a stream, in fixed memory
// and without counting all keys.
//
// It is Space-Saving (Metwally, Agrawal and El Abbadi, 2005): a fixed number of
// counters, and a key that has none takes over the smallest. A key that makes up
// more than one in Counters of the stream is always among them, and its count is
// too high by at most the smallest counter. Counts are halved now and then, so
// that shares speak of recent traffic.
package topkeys

import (
	"cmp"
	"slices"
	"sync"
)

// Counters is how many keys are followed.
const Counters = 32

// halveAt is how many observations count before all counts are halved.
const halveAt = 8192

// Sketch follows the most frequent keys of a stream. The zero value is empty and
// ready to use. It is safe for concurrent use.
type Sketch struct {
	mu       sync.Mutex
	keys     [Counters]uint64
	counts   [Counters]uint32
	observed uint32
}

// Key is a frequent key and its share of the stream, from 0 to 1.
type Key struct {
	Hash  uint64
	Share float64
}

// Observe counts one occurrence of key, and returns how many observations the
// shares are of now.
func (s *Sketch) Observe(key uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observed++
	if s.observed > halveAt {
		s.halve()
	}
	smallest := 0
	for i := range s.keys {
		if s.keys[i] == key && s.counts[i] > 0 {
			s.counts[i]++
			return int(s.observed)
		}
		if s.counts[i] < s.counts[smallest] {
			smallest = i
		}
	}
	s.keys[smallest] = key
	s.counts[smallest]++
	return int(s.observed)
}

func (s *Sketch) halve() {
	s.observed /= 2
	for i := range s.counts {
		s.counts[i] /= 2
	}
}

// Top returns the most frequent key, and how many observations its share is of.
// Without any observation the share is 0.
func (s *Sketch) Top() (top Key, observed int) {
	keys, observed := s.All()
	if len(keys) == 0 {
		return Key{}, observed
	}
	return keys[0], observed
}

// All returns the keys that are followed, the most frequent first, and how many
// observations their shares are of.
func (s *Sketch) All() (keys []Key, observed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, count := range s.counts {
		if count > 0 {
			keys = append(keys, Key{s.keys[i], min(1, float64(count)/float64(s.observed))})
		}
	}
	slices.SortFunc(keys, func(a, b Key) int { return cmp.Compare(b.Share, a.Share) })
	return keys, int(s.observed)
}
