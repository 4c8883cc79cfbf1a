package edgelimit

import (
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

const oneDay = 24 * time.Hour

func TestParseRate(t *testing.T) {
	for _, test := range []struct {
		text   string
		count  int64 // 0: refused
		window time.Duration
	}{
		// as people write them
		{"10/m", 10, time.Minute},
		{"100/s", 100, time.Second},
		{"5000/h", 5000, time.Hour},
		{"20/10s", 20, 10 * time.Second},
		{"1/1d", 1, oneDay},
		{"1/d", 1, oneDay},
		{"7/1h30m", 7, 90 * time.Minute},
		{"7/1.5h", 7, 90 * time.Minute},
		{"3/0.5d", 3, 12 * time.Hour},
		{"3/1d12h", 3, 36 * time.Hour},
		{"10/100ms", 10, 100 * time.Millisecond},

		// the bounds
		{"1/ms", 1, time.Millisecond},
		{"1/1ms", 1, time.Millisecond},
		{"1/999us", 0, 0},
		{"1/us", 0, 0},
		{"1/ns", 0, 0},
		{"1/3650d", 1, 3650 * oneDay},
		{"1/3651d", 0, 0},
		{"1/87600h", 1, 3650 * oneDay},
		{"1/87601h", 0, 0},
		{"1000000000/s", 1_000_000_000, time.Second},
		{"1000000001/s", 0, 0},
		{"1000000/ms", 1_000_000, time.Millisecond},
		{"1000001/ms", 0, 0},
		{"9223372036854775807/3650d", 0, 0},
		{"9223372036854775808/s", 0, 0},

		// no whole number of nanoseconds for each request, to within a hundredth
		{"10000000/s", 10_000_000, time.Second}, // 100ns
		{"300000000/s", 0, 0},                   // 3.33ns
		{"500000000/s", 500_000_000, time.Second},
		{"900000000/s", 0, 0}, // 1.11ns

		// counts that are none
		{"0/m", 0, 0},
		{"-1/m", 0, 0},
		{"0.5/s", 0, 0},
		{"1e3/s", 0, 0},
		{"1e30/s", 0, 0},
		{"NaN/s", 0, 0},
		{"Inf/s", 0, 0},
		{"0x10/s", 0, 0},
		{"1_000/s", 0, 0},
		{"1,000/s", 0, 0},
		{"ten/s", 0, 0},
		{"/s", 0, 0},
		{" 10/s", 0, 0},
		{"10 /s", 0, 0},
		{"\u0661\u0660/s", 0, 0},

		// windows that are none
		{"10/", 0, 0},
		{"10/0", 0, 0},
		{"10/0s", 0, 0},
		{"10/-1s", 0, 0},
		{"10/-s", 0, 0},
		{"10/+1s", 0, 0},
		{"10/1", 0, 0},
		{"10/60", 0, 0},
		{"10/x", 0, 0},
		{"10/S", 0, 0},
		{"10/sec", 0, 0},
		{"10/minute", 0, 0},
		{"10/300y", 0, 0},
		{"10/109500d", 0, 0},
		{"10/1e30s", 0, 0},
		{"10/99999999999999999999h", 0, 0},
		{"10/NaNs", 0, 0},
		{"10/ s", 0, 0},
		{"10/s ", 0, 0},
		{"10/m/s", 0, 0},
		{"10/" + strings.Repeat("1", 2000) + "s", 0, 0},

		// a unit alone means one of it, and nothing else has a 1 put before it
		{"10/.5s", 0, 0},
		{"10/m30s", 0, 0},
		{"10/h30m", 0, 0},
		{"10/d12h", 0, 0},

		// no rates at all
		{"", 0, 0},
		{"/", 0, 0},
		{"10", 0, 0},
		{"10m", 0, 0},
		{"10 per m", 0, 0},
		{"m/10", 0, 0},
	} {
		r, err := parseRate(test.text)
		if test.count == 0 {
			if err == nil {
				t.Errorf("parseRate(%.40q) = %v, want an error", test.text, r)
			} else if len(test.text) < 100 && !strings.Contains(err.Error(), `"`+test.text+`"`) {
				t.Errorf("parseRate(%q): %v, want an error that shows what was written", test.text, err)
			}
			continue
		}
		if err != nil || r.count != test.count || r.window != test.window {
			t.Errorf("parseRate(%q) = %d in %s, %v, want %d in %s", test.text, r.count, r.window, err, test.count, test.window)
		}
	}
}

func TestRateString(t *testing.T) {
	for _, test := range []struct {
		alike []string
		want  string
	}{
		{[]string{"10/m", "10/1m", "10/60s", "10/60000ms", "10/1m0s"}, "10/1m0s"},
		{[]string{"1/d", "1/1d", "1/24h", "1/0.5d12h"}, "1/24h0m0s"},
		{[]string{"20/10s"}, "20/10s"},
	} {
		for _, text := range test.alike {
			r, err := parseRate(text)
			if err != nil {
				t.Errorf("parseRate(%q): %v", text, err)
				continue
			}
			if r.String() != test.want {
				t.Errorf("%s is written as %s, want %s", text, r, test.want)
			}
			again, err := parseRate(r.String())
			if err != nil || again != r {
				t.Errorf("%s is read back as %v, %v", r, again, err)
			}
		}
	}
}

func TestEmissionInterval(t *testing.T) {
	for _, test := range []struct {
		rate string
		want time.Duration
	}{
		{"1/s", time.Second},
		{"10/m", 6 * time.Second},
		{"3/s", 333_333_334}, // up, never down
		{"7/s", 142_857_143},
		{"1000000000/s", 1},
		{"1/3650d", 3650 * oneDay},
	} {
		r, err := parseRate(test.rate)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.emissionInterval(); got != test.want {
			t.Errorf("%s: emission interval %d, want %d", test.rate, got, test.want)
		}
	}
}

// requireExactRate checks what holds for every rate that is accepted, in
// integers without bounds.
func requireExactRate(t *testing.T, r rate) {
	t.Helper()
	if r.count < 1 || r.window < time.Millisecond || r.window > 3650*oneDay {
		t.Fatalf("%+v was accepted", r)
	}
	count, window := big.NewInt(r.count), big.NewInt(int64(r.window))
	interval := big.NewInt(int64(r.emissionInterval()))
	whole := new(big.Int).Mul(count, interval)
	if whole.Cmp(window) < 0 {
		t.Errorf("%v: %s intervals of %sns end before the window: more pass than the rate says", r, count, interval)
	}
	less := new(big.Int).Mul(count, new(big.Int).Sub(interval, big.NewInt(1)))
	if less.Cmp(window) >= 0 {
		t.Errorf("%v: an interval of %sns is longer than rounding up makes it", r, interval)
	}
	// 99 % of the rate is kept: window / interval >= 0.99 * count
	kept := new(big.Int).Mul(window, big.NewInt(100))
	if kept.Cmp(new(big.Int).Mul(whole, big.NewInt(99))) < 0 {
		t.Errorf("%v: an interval of %sns keeps less than 99 %% of the rate", r, interval)
	}
	tolerance, err := r.tolerance(r.count)
	if err != nil {
		t.Errorf("%v: the default burst is refused: %v", r, err)
	}
	if tolerance < r.window {
		t.Errorf("%v: tolerance %s of the default burst is shorter than the window", r, tolerance)
	}
	again, err := parseRate(r.String())
	if err != nil || again != r {
		t.Errorf("%v is read back as %v, %v", r, again, err)
	}
}

func TestRatesAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	// spread over all magnitudes
	magnitude := func(most int64) int64 {
		return max(1, int64(math.Exp(random.Float64()*math.Log(float64(most)))))
	}
	accepted := 0
	for range 100_000 {
		r := rate{count: magnitude(math.MaxInt64), window: time.Duration(magnitude(int64(4000 * oneDay)))}
		parsed, err := parseRate(r.String())
		if err != nil {
			continue
		}
		if parsed != r {
			t.Fatalf("%+v is read back as %+v", r, parsed)
		}
		accepted++
		requireExactRate(t, r)
		if t.Failed() {
			return
		}
	}
	if accepted < 10_000 {
		t.Errorf("only %d of 100000 rates were accepted", accepted)
	}
}

func FuzzParseRate(f *testing.F) {
	for _, seed := range []string{"10/m", "1/1d", "7/1h30m", "1000000000/s", "3/0.5d", "10/d", "10/dd", "10/.5s", "1/1d1d"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if r, err := parseRate(text); err == nil {
			requireExactRate(t, r)
		}
	})
}

func TestTolerance(t *testing.T) {
	const century = 100 * 365 * oneDay
	for _, test := range []struct {
		rate  string
		burst int64
		want  time.Duration // 0: refused
	}{
		{"10/m", 1, 6 * time.Second},
		{"10/m", 10, time.Minute},
		{"10/m", 25, 150 * time.Second},
		{"3/s", 3, 1_000_000_002}, // three whole intervals

		{"10/m", 0, 0},
		{"10/m", -1, 0},
		{"10/m", math.MinInt64, 0},

		// the bound, and where the product no longer fits
		{"1/d", 36_500, century},
		{"1/d", 36_501, 0},
		{"1/3650d", 10, century},
		{"1/3650d", 11, 0},
		{"1/3650d", math.MaxInt64, 0},
		{"1000000000/s", int64(century), century},
		{"1000000000/s", int64(century) + 1, 0},
		{"1000000000/s", math.MaxInt64, 0},
		{"10/m", math.MaxInt64, 0},
		{"10/m", math.MaxInt64/6_000_000_000 + 1, 0}, // would wrap to a negative one
		{"1/s", math.MaxInt64 / 2, 0},
	} {
		r, err := parseRate(test.rate)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.tolerance(test.burst)
		if test.want == 0 {
			if err == nil {
				t.Errorf("%s with burst %d: tolerance %s, want an error", test.rate, test.burst, got)
			} else if !strings.Contains(err.Error(), "burst") {
				t.Errorf("%s with burst %d: %v, want an error that says burst", test.rate, test.burst, err)
			}
			continue
		}
		if err != nil || got != test.want {
			t.Errorf("%s with burst %d: tolerance %s, %v, want %s", test.rate, test.burst, got, err, test.want)
		}
	}
}
