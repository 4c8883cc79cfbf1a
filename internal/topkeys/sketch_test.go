package topkeys

import (
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"
)

func TestShares(t *testing.T) {
	tests := []struct {
		why    string
		stream func(rng *rand.Rand) uint64
		hash   uint64
		from   float64
		to     float64
	}{
		{"one key is all of the traffic", func(*rand.Rand) uint64 { return 7 }, 7, 1, 1},
		{"one key is six in ten, among many others", func(rng *rand.Rand) uint64 {
			if rng.IntN(10) < 6 {
				return 7
			}
			return rng.Uint64()
		}, 7, 0.55, 0.66},
		{"one key is one in five, the others never come back", func(rng *rand.Rand) uint64 {
			if rng.IntN(5) == 0 {
				return 7
			}
			return rng.Uint64()
		}, 7, 0.16, 0.27},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			var s Sketch
			for range 100_000 {
				s.Observe(tt.stream(rng))
			}
			top, observed := s.Top()
			if top.Hash != tt.hash || top.Share < tt.from || top.Share > tt.to {
				t.Errorf("top is %+v of %d, want key %d with a share from %v to %v", top, observed, tt.hash, tt.from, tt.to)
			}
		})
	}
}

// A share must speak of recent traffic: who stops dominating is forgotten.
func TestSharesFade(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var s Sketch
	for range 50_000 {
		s.Observe(7)
	}
	for range 50_000 {
		s.Observe(rng.Uint64())
	}
	if top, _ := s.Top(); top.Share > 0.2 {
		t.Errorf("a key that left long ago still has the share %v (%d)", top.Share, top.Hash)
	}
}

// A key above its share of the counters is followed whatever else comes: the
// guarantee of Space-Saving, against an exact count.
func TestFrequentKeysAreFollowed(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	exact := make(map[uint64]int)
	var s Sketch
	const n = halveAt // before anything is halved
	for range n {
		key := uint64(rng.ExpFloat64() * 8)
		exact[key]++
		s.Observe(key)
	}
	keys, _ := s.All()
	shares := make(map[uint64]float64)
	for _, key := range keys {
		shares[key.Hash] = key.Share
	}
	for key, count := range exact {
		if count > n/Counters && shares[key] < float64(count)/n {
			t.Errorf("key %d has %d of %d, the sketch says %v", key, count, n, shares[key])
		}
	}
}

func TestEmpty(t *testing.T) {
	var s Sketch
	if top, observed := s.Top(); top.Share != 0 || observed != 0 {
		t.Errorf("an empty sketch has the top %+v of %d", top, observed)
	}
}

func TestConcurrentAndSmall(t *testing.T) {
	var s Sketch
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 1000 {
				s.Observe(uint64(i))
			}
		})
	}
	wg.Wait()
	if _, observed := s.All(); observed != 8000 {
		t.Errorf("%d observations, want 8000", observed)
	}
	if size := unsafe.Sizeof(s); size > 512 {
		t.Errorf("a sketch takes %d bytes, want at most 512", size)
	}
	if allocs := testing.AllocsPerRun(100, func() { s.Observe(3) }); allocs != 0 {
		t.Errorf("observing allocates %v times", allocs)
	}
}

func BenchmarkObserve(b *testing.B) {
	var s Sketch
	key := uint64(0)
	for b.Loop() {
		key += 0x9e3779b97f4a7c15
		s.Observe(key)
	}
}
