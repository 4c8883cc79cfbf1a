package edgelimit

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/dunglas/httpsfv"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func TestRatelimitHeaders(t *testing.T) {
	site := func(option string) string {
		return `:80 {
			edge_limit {
				` + option + `
				limit wide 100/m
				limit narrow 3/h
				ceiling all 1000/s
			}
			respond ok
		}`
	}
	t.Run("off by default", func(t *testing.T) {
		h := newInstance(t, site("")).send(requestFrom(alice, "/")).Header()
		expect(t, h.Get("RateLimit")+h.Get("X-RateLimit-Limit"), "", "nothing is told without being asked for")
	})
	t.Run("where a file is sent by the kernel", func(t *testing.T) {
		i := newInstance(t, site("ratelimit_headers x"))
		w := httptest.NewRecorder()
		err := i.handlers[0].ServeHTTP(w, prepared(requestFrom(alice, "/"), i.server), caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			_, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader("a file"))
			return err
		}))
		expect(t, err, nil, "error")
		expect(t, w.Result().Header.Get("X-RateLimit-Remaining"), "2", "written before the body")
	})
	t.Run("nothing of a trial run", func(t *testing.T) {
		for _, lines := range []string{"observe\nlimit narrow 3/h", "limit narrow 3/h {\nobserve\n}"} {
			i := newInstance(t, ":80 {\nedge_limit {\nratelimit_headers x\n"+lines+"\n}\nrespond ok\n}")
			for range 5 {
				expect(t, i.send(requestFrom(alice, "/")).Header().Get("X-RateLimit-Remaining"), "", lines)
			}
		}
		i := newInstance(t, ":80 {\nedge_limit {\nratelimit_headers x\nlimit trial 3/h {\nobserve\n}\nlimit real 9/h\n}\nrespond ok\n}")
		expect(t, i.send(requestFrom(alice, "/")).Header().Get("X-RateLimit-Limit"), "9", "the limit that can deny")
	})
	t.Run("x", func(t *testing.T) {
		i := newInstance(t, site("ratelimit_headers x"))
		h := i.send(requestFrom(alice, "/")).Header()
		expect(t, h.Get("X-RateLimit-Limit"), "3", "the limit closest to denying")
		expect(t, h.Get("X-RateLimit-Remaining"), "2", "two are left")
		expect(t, h.Get("X-RateLimit-Reset"), "1200", "seconds until all is there again")
	})
	t.Run("ietf", func(t *testing.T) {
		i := newInstance(t, site("ratelimit_headers ietf"))
		for _, want := range []struct {
			status       int
			policy, left string
		}{
			{200, `"narrow";q=3;w=3600`, `"narrow";r=2;t=1200`},
			{200, `"narrow";q=3;w=3600`, `"narrow";r=1;t=2400`},
			{200, `"narrow";q=3;w=3600`, `"narrow";r=0;t=1200`}, // until one more is possible
			{429, `"narrow";q=3;w=3600`, `"narrow";r=0;t=1200`},
		} {
			w := i.send(requestFrom(alice, "/"))
			expect(t, w.Code, want.status, "status")
			expect(t, w.Header().Get("RateLimit-Policy"), want.policy, "policy")
			expect(t, w.Header().Get("RateLimit"), want.left, "what is left")
			if _, err := httpsfv.UnmarshalList(w.Header()["Ratelimit"]); err != nil {
				t.Errorf("it is no structured field: %v", err)
			}
		}
	})
}

// The headers belong to the final response: a 103 must not carry them, and an
// upstream's own are replaced.
func TestRatelimitHeadersAreWrittenLast(t *testing.T) {
	i := newInstance(t, `:80 {
		edge_limit {
			limit a 3/h
			ratelimit_headers x
		}
	}`)
	w := &statusWriter{header: make(http.Header)}
	err := i.handlers[0].ServeHTTP(w, prepared(requestFrom(alice, "/"), i.server), caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusEarlyHints)
		expect(t, w.Header().Get("X-RateLimit-Limit"), "", "in a 103")
		w.Header().Set("X-RateLimit-Limit", "the upstream's")
		w.WriteHeader(200)
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, w.header.Get("X-RateLimit-Limit"), "3", "in the final response")
}

// A client must not be told to come back before the limit says so.
func TestRetryAfterIsNotEarlierThanReset(t *testing.T) {
	i := newInstance(t, `:80 {
		edge_limit {
			limit a 1/h {
				ban 10m
			}
			ratelimit_headers ietf
		}
		respond ok
	}`)
	i.get(alice, "/")
	for range 3 {
		h := i.send(requestFrom(alice, "/")).Header()
		expect(t, h.Get("Retry-After")+" "+h.Get("RateLimit"), `3600 "a";r=0;t=3600`, "both outlast the ban")
	}
}

func TestProblemDetails(t *testing.T) {
	i := newInstance(t, `:80 {
		edge_limit /limit {
			limit a 1/h
		}
		edge_limit /ceiling {
			ceiling b 1/h
		}
		respond ok
	}`)
	i.get(alice, "/limit")
	i.get(alice, "/ceiling")
	tests := []struct {
		why, path, accept, contentType, body string
	}{
		{"a browser gets no body, and shows a page of its own", "/limit", "text/html,*/*", "", ""},
		{"no Accept gets none, as of any error of Caddy's", "/limit", "", "", ""},
		{"a client of JSON gets a problem that names the limit", "/limit", "application/json", "application/problem+json",
			`{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"violated-policies":["a"]}` + "\n"},
		{"a ceiling's headroom and name are nobody's business", "/ceiling", "application/problem+json", "application/problem+json",
			`{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Request cannot be satisfied due to temporary server capacity constraints","status":503}` + "\n"},
	}
	for _, tt := range tests {
		w := i.send(requestFrom(alice, tt.path, "Accept: "+tt.accept))
		expect(t, w.Header().Get("Content-Type"), tt.contentType, tt.why)
		expect(t, w.Body.String(), tt.body, tt.why)
	}
}
