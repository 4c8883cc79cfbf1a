package edgelimit

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// probeServer answers like a probe whose resolver is resolve: an address, or ""
// for unresolved.
func probeServer(t *testing.T, resolve func(r *http.Request) string) *httptest.Server {
	return answeringServer(t, func(w http.ResponseWriter, r *http.Request) {
		writeProbeAnswer(w, resolve(r), nil)
	})
}

func answeringServer(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	t.Cleanup(server.Close)
	return server
}

func writeProbeAnswer(w http.ResponseWriter, resolved string, change func(*probeAnswer)) {
	answer := probeAnswer{Resolved: &resolved, Source: "hops", Healthy: true, TrustedProxyHops: 1}
	if resolved == "" {
		answer = probeAnswer{Source: "unresolved", Reason: "missing_header", Advice: "your proxy sends no X-Forwarded-For"}
	}
	if change != nil {
		change(&answer)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// peerAddress is the right answer where nothing stands in front.
func peerAddress(r *http.Request) string {
	return netip.MustParseAddrPort(r.RemoteAddr).Addr().String()
}

// leftmostOf is the wrong answer: what the caller wrote in one of these headers,
// and fallback if it wrote nothing.
func leftmostOf(r *http.Request, fallback string, names ...string) string {
	for _, name := range names {
		for _, value := range r.Header[name] {
			entry, _, _ := strings.Cut(value, ",")
			entry = strings.TrimPrefix(strings.TrimSpace(entry), "for=")
			if addr, err := netip.ParseAddr(entry); err == nil {
				return addr.String()
			}
		}
	}
	return fallback
}

// probeFrom runs the command and returns its status, what it printed, and its
// error.
func probeFrom(t *testing.T, args ...string) (status probeVerdict, stdout string, err error) {
	t.Helper()
	cmd := newProbeCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	cmd.SilenceUsage = true // as Caddy's own root command has it
	cmd.SetArgs(args)
	err = cmd.Execute()
	if err == nil {
		return verdictSpoofProof, out.String(), nil
	}
	if n, scanErr := fmt.Sscanf(err.Error(), "exiting with status %d", &status); n == 1 && scanErr == nil {
		return status, out.String(), nil
	}
	return verdictUnclear, out.String(), err
}

func TestProbeCommandVerdicts(t *testing.T) {
	for _, row := range []struct {
		name    string
		handler http.HandlerFunc
		args    []string
		want    probeVerdict
		says    []string // on stdout
	}{
		{
			name:    "right",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, peerAddress(r), nil) },
			want:    verdictSpoofProof,
			says:    []string{"SPOOF-PROOF: 50 forged requests", "127.0.0.1"},
		},
		{
			name:    "right, and as expected",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "198.51.100.22", nil) },
			args:    []string{"--expect", "198.51.100.22"},
			want:    verdictSpoofProof,
			says:    []string{"SPOOF-PROOF"},
		},
		{
			name:    "some public address: perhaps a proxy's",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "198.51.100.22", nil) },
			want:    verdictSpoofProof,
			says:    []string{"SPOOF-PROOF", "--expect <address>"},
		},
		{
			name: "rests on unverified hops",
			handler: func(w http.ResponseWriter, r *http.Request) {
				writeProbeAnswer(w, peerAddress(r), func(a *probeAnswer) { a.SpoofIgnored, a.Healthy = new(bool), false })
			},
			want: verdictSpoofProof,
			says: []string{"SPOOF-PROOF", "Note: the answer rests on unverified hops"},
		},
		{
			name: "right, and a reason to look",
			handler: func(w http.ResponseWriter, r *http.Request) {
				writeProbeAnswer(w, peerAddress(r), func(a *probeAnswer) { a.Reason, a.Advice = "short_chain", "hops is too high" })
			},
			want: verdictSpoofProof,
			says: []string{"SPOOF-PROOF", "Note: short_chain: hops is too high"},
		},
		{
			name: "believes the leftmost entry",
			handler: func(w http.ResponseWriter, r *http.Request) {
				writeProbeAnswer(w, leftmostOf(r, "127.0.0.1", headerForwardedFor), nil)
			},
			want: verdictSpoofable,
			says: []string{"SPOOFABLE: with X-Forwarded-For ", "each new address has a new budget", "Mend: trusted_proxies contains"},
		},
		{
			name: "passes the caller's header on, and sends none itself",
			handler: func(w http.ResponseWriter, r *http.Request) {
				writeProbeAnswer(w, leftmostOf(r, "", headerForwardedFor), nil)
			},
			want: verdictSpoofable,
			says: []string{"SPOOFABLE: with X-Forwarded-For ", "UNRESOLVED", "Mend: whoever connects to Caddy is trusted", "proxy_set_header"},
		},
		{
			name: "denies who is unresolved, and believes the rest",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get(headerForwardedFor) == "" {
					w.WriteHeader(http.StatusForbidden)
					return
				}
				writeProbeAnswer(w, leftmostOf(r, "192.168.7.7", headerForwardedFor), nil)
			},
			want: verdictSpoofable,
			says: []string{"SPOOFABLE: with X-Forwarded-For ", "UNRESOLVED: the plain request is denied with status 403"},
		},
		{
			name: "counts two hops too many",
			handler: func(w http.ResponseWriter, r *http.Request) {
				entries := strings.Split(strings.Join(r.Header[headerForwardedFor], ","), ",")
				resolved := "127.0.0.1"
				if len(entries) >= 2 {
					resolved = strings.TrimSpace(entries[len(entries)-2])
				}
				if _, err := netip.ParseAddr(resolved); err != nil {
					resolved = ""
				}
				writeProbeAnswer(w, resolved, func(a *probeAnswer) {
					if len(entries) >= 2 {
						a.SpoofIgnored = new(bool)
					}
				})
			},
			want: verdictSpoofable,
			says: []string{"SPOOFABLE: with X-Forwarded-For ", "Mend: `hops` is 2 too high: lower it by 2"},
		},
		{
			name: "another answer for each header, but none that was forged",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get(headerForwarded) != "" {
					writeProbeAnswer(w, "198.18.0.1", nil)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: verdictSpoofable,
			says: []string{"SPOOFABLE: with Forwarded a caller changes who it is: it was resolved to 198.18.0.1, and to 127.0.0.1 without"},
		},
		{
			name:    "unresolved",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "", nil) },
			want:    verdictUnresolved,
			says:    []string{"UNRESOLVED: honest callers", "missing_header", "Mend: your proxy sends no X-Forwarded-For"},
		},
		{
			name: "a caller can become unresolved",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.Header.Get("Connection"), headerForwardedFor) {
					writeProbeAnswer(w, "", nil)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: verdictUnresolved,
			says: []string{"UNRESOLVED: with Connection", "Mend: a proxy in front obeys the caller's Connection header"},
		},
		{
			name:    "a private address of nobody here",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "10.11.12.13", nil) },
			want:    verdictOverGrouped,
			says:    []string{"OVER-GROUPED: you are resolved to 10.11.12.13, a private address that this machine does not have", "Mend: more proxies stand in front"},
		},
		{
			name:    "a private address of nobody here, but expected",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "10.11.12.13", nil) },
			args:    []string{"--expect", "10.11.12.13"},
			want:    verdictSpoofProof,
		},
		{
			name:    "a loopback address that was not spoken from",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "127.0.0.77", nil) },
			want:    verdictOverGrouped,
		},
		{
			name:    "not what is expected",
			handler: func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, "198.51.100.23", nil) },
			args:    []string{"--expect=198.51.100.22"},
			want:    verdictOverGrouped,
			says:    []string{"OVER-GROUPED: you are resolved to 198.51.100.23, and 198.51.100.22 was expected", "raise `hops`"},
		},
		{
			name: "a proxy that is not trusted",
			handler: func(w http.ResponseWriter, r *http.Request) {
				writeProbeAnswer(w, peerAddress(r), func(a *probeAnswer) {
					ignored := true
					a.Source, a.Reason, a.SpoofIgnored, a.Advice = "connection", "untrusted_header", &ignored, "add `trusted_proxies static 127.0.0.0/8`"
				})
			},
			want: verdictOverGrouped,
			says: []string{"OVER-GROUPED", "which this command did not write", "Mend: add `trusted_proxies static 127.0.0.0/8`"},
		},
		{
			name: "a caller can leave a private address for the state unresolved",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get(headerForwardedFor) != "" {
					writeProbeAnswer(w, "", nil)
					return
				}
				writeProbeAnswer(w, "10.11.12.13", nil)
			},
			want: verdictOverGrouped, // comes before unresolved
			says: []string{"OVER-GROUPED", "UNRESOLVED: with X-Forwarded-For (one entry)"},
		},
		{
			name: "forged requests are refused",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get(headerForwardedFor) != "" {
					w.WriteHeader(http.StatusBadRequest)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: verdictSpoofProof,
			says: []string{"SPOOF-PROOF", "refused (status 400)", "Note: forged requests that were refused before the probe"},
		},
		{
			name: "the connection breaks when something is forged",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get(headerForwarded) != "" {
					panic(http.ErrAbortHandler)
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: verdictSpoofProof,
			says: []string{"SPOOF-PROOF", "closed the connection without an answer"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			server := answeringServer(t, row.handler)
			status, stdout, err := probeFrom(t, append(row.args, server.URL+"/client-ip")...)
			if status != row.want || err != nil {
				t.Errorf("status %d (%v), want %d", status, err, row.want)
			}
			for _, words := range row.says {
				if !strings.Contains(stdout, words) {
					t.Errorf("it does not say %q", words)
				}
			}
			if t.Failed() {
				t.Log(stdout)
			}
		})
	}
}

// Whichever header a resolver believes, the command names it.
func TestProbeCommandNamesTheHeader(t *testing.T) {
	alike := []string{"X_Forwarded_For", "X.Forwarded.For", "X_Real_IP", "CF.Connecting.IP"}
	for _, name := range slices.Concat(identityHeaders, rareIdentityHeaders[:3], alike) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			canonical := http.CanonicalHeaderKey(name)
			server := probeServer(t, func(r *http.Request) string { return leftmostOf(r, peerAddress(r), canonical) })
			status, stdout, err := probeFrom(t, server.URL)
			if status != verdictSpoofable || err != nil {
				t.Errorf("status %d, %v", status, err)
			}
			if want := "SPOOFABLE: with " + name + " a caller"; !strings.Contains(stdout, want) || !strings.Contains(stdout, "each new address has a new budget") {
				t.Errorf("it does not say %q:\n%s", want, stdout)
			}
		})
	}
}

func TestProbeCommandCouldNotTell(t *testing.T) {
	var served atomic.Int64
	answer := func(status int, header, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if name, value, ok := strings.Cut(header, ": "); ok {
				w.Header().Set(name, value)
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}
	}
	for _, row := range []struct {
		name    string
		handler http.HandlerFunc
		path    string
		args    []string
		want    string
	}{
		{name: "no page", handler: answer(404, "Content-Type: text/html", "<h1>Not found</h1>"), want: "no probe is there: status 404, text/html; put `edge_limit_probe"},
		{name: "another page", handler: answer(200, "Content-Type: text/html", "<h1>Welcome</h1>"), want: "no probe is there: the answer, text/html is no JSON"},
		{name: "JSON of another service", handler: answer(200, "Content-Type: application/json", `{"status": "ok"}`), want: "no probe is there: the answer is JSON of something else"},
		{name: "JSON that is no object", handler: answer(200, "", `["resolved", "source", "healthy"]`), want: "is no JSON"},
		{name: "JSON with other types", handler: answer(200, "", `{"resolved": 7, "source": "hops", "healthy": true}`), want: "JSON of something else"},
		{name: "resolved to no address", handler: answer(200, "", "{\"resolved\": \"\\u001b[2J\", \"source\": \"hops\", \"healthy\": true}"), want: `the answer says "\x1b[2J", which is no address`},
		{name: "an empty answer", handler: answer(200, "", ""), want: "is no JSON"},
		{name: "denied", handler: answer(403, "", ""), want: "status 403: the request was denied before the probe"},
		{name: "a password", handler: answer(401, "", ""), want: "status 401: name and password are asked for"},
		{name: "a limit", handler: answer(429, "Retry-After: 7", ""), want: "a limit denied the request (status 429, Retry-After 7)"},
		{name: "a ceiling", handler: answer(503, "Retry-After: 7", ""), want: "a limit denied the request (status 503, Retry-After 7)"},
		{name: "broken", handler: answer(502, "", ""), want: "the server failed with status 502"},
		{name: "a redirect to TLS", handler: answer(308, "Location: https://example.com/client-ip", ""), want: "redirects to https://example.com/client-ip, and is not followed; if that is your site, probe that URL"},
		{name: "a redirect within the site", handler: answer(301, "Location: /other", ""), want: "/other, and is not followed"},
		{name: "a redirect loop", handler: answer(302, "Location: /client-ip", ""), path: "/client-ip", want: "redirects to itself"},
		{name: "a redirect that steers a terminal", handler: answer(302, "Location: /\xc2\x9b2J", ""), want: `/%C2%9B2J`},
		{
			name: "slow", args: []string{"--timeout=100ms"},
			handler: func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			want:    "did not answer within 100ms",
		},
		{
			name: "slow in the middle of the answer", args: []string{"--timeout=100ms"},
			handler: func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, "{")
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			},
			want: "did not answer within 100ms",
		},
		{
			name: "a limit, after a while",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if served.Add(1) > 10 {
					w.WriteHeader(http.StatusTooManyRequests)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: "a limit denied the request (status 429, Retry-After none)",
		},
		{
			name: "all that is forged is refused",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if len(r.Header) > 2 { // Accept, User-Agent
					w.WriteHeader(http.StatusBadRequest)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: "no forged request got as far as the probe",
		},
		{
			name: "broken in the end",
			handler: func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.Header.Get("Connection"), headerForwardedFor) {
					w.WriteHeader(http.StatusInternalServerError)
					return
				}
				writeProbeAnswer(w, peerAddress(r), nil)
			},
			want: "Connection (Connection names it): the server failed with status 500",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			server := answeringServer(t, row.handler)
			status, stdout, err := probeFrom(t, append(row.args, server.URL+row.path)...)
			if status != verdictUnclear || err == nil || !strings.Contains(err.Error(), "could not tell: ") || !strings.Contains(err.Error(), row.want) {
				t.Errorf("status %d: %v\nwant an error with %q", status, err, row.want)
			}
			if strings.Contains(stdout, "PROOF") {
				t.Error(stdout)
			}
		})
	}
}

func TestProbeCommandMeetsNoHTTP(t *testing.T) {
	closed := httptest.NewServer(nil)
	closed.Close()
	plain := probeServer(t, peerAddress)
	secure := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { writeProbeAnswer(w, peerAddress(r), nil) }))
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS() // without HTTP/2
	t.Cleanup(secure.Close)

	silent, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: secure.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = http.Serve(silent, secure.Config.Handler) }()
	t.Cleanup(func() { silent.Close() })

	for _, row := range []struct {
		name string
		args []string
		want string
	}{
		{"down", []string{closed.URL}, "nothing answers at 127.0.0.1:"},
		{"no host", []string{"http://nobody.invalid/"}, "no host nobody.invalid"},
		{"another protocol", []string{"http://" + lineServer(t, "SSH-2.0-OpenSSH_9.2p1\r\n")}, "does not speak HTTP"},
		{"a bare hang-up", []string{"http://" + lineServer(t, "")}, "closed the connection without an answer"},
		{"TLS to one that has none", []string{strings.Replace(plain.URL, "http:", "https:", 1)}, "write http:// instead of https://"},
		{"no TLS to one that wants it", []string{strings.Replace(secure.URL, "https:", "http:", 1)}, "write https:// instead of http://"},
		{"a certificate of nobody", []string{secure.URL}, "add --insecure"},
		{"no HTTP/2", []string{"--insecure", "--http2", secure.URL}, "does not speak HTTP/2"},
		{"no HTTP/2, and nothing to negotiate", []string{"--insecure", "--http2", "https://" + silent.Addr().String()}, "does not speak HTTP/2"},
		{"HTTP/2 without TLS", []string{"--http2", plain.URL}, "--http2 needs an https URL"},
		{"no URL", []string{"http://"}, "names no host"},
		{"no scheme that is known", []string{"ftp://localhost/"}, "only http and https"},
		{"a URL that is none", []string{"http://user:secret@local host/"}, "the URL cannot be read"},
		{"an expectation that is none", []string{"--expect", "me", plain.URL}, `--expect "me": not an address`},
		{"no time", []string{"--timeout", "0s", plain.URL}, "must be above 0"},
		{"nothing", nil, "accepts 1 arg"},
		{"two URLs", []string{plain.URL, plain.URL}, "accepts 1 arg"},
		{"a mistyped flag", []string{"--insecur", plain.URL}, "unknown flag"},
	} {
		status, _, err := probeFrom(t, row.args...)
		if status != verdictUnclear || err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: status %d: %v\nwant an error with %q", row.name, status, err, row.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error tells the password: %v", row.name, err)
		}
	}
	if status, stdout, err := probeFrom(t, "--insecure", secure.URL); status != verdictSpoofProof || err != nil {
		t.Errorf("--insecure: status %d, %v\n%s", status, err, stdout)
	}
}

// lineServer says one line to whoever connects, and hangs up.
func lineServer(t *testing.T, line string) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = bufio.NewReader(conn).ReadString('\n')
			_, _ = io.WriteString(conn, line)
			conn.Close()
		}
	}()
	return listener.Addr().String()
}

// An honest answer that changes by itself is no finding about forged ones.
func TestProbeCommandOfAChangingAddress(t *testing.T) {
	var n atomic.Int64
	server := probeServer(t, func(*http.Request) string { return fmt.Sprintf("198.18.0.%d", 1+n.Add(1)%3) })
	status, stdout, err := probeFrom(t, server.URL)
	if status != verdictUnclear || err == nil || !strings.Contains(err.Error(), "your own address changes") {
		t.Errorf("status %d, %v\n%s", status, err, stdout)
	}

	// but what was forged and believed is one
	server = probeServer(t, func(r *http.Request) string {
		return leftmostOf(r, fmt.Sprintf("198.18.0.%d", 1+n.Add(1)%3), headerForwardedFor)
	})
	if status, stdout, err := probeFrom(t, server.URL); status != verdictSpoofable || err != nil {
		t.Errorf("status %d, %v\n%s", status, err, stdout)
	}
}

func TestProbeCommandSpeaksBothHTTP(t *testing.T) {
	var mu sync.Mutex
	seen := make(map[string]int)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Proto]++
		mu.Unlock()
		writeProbeAnswer(w, peerAddress(r), nil)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	for _, row := range []struct {
		flags []string
		want  []string
	}{
		{nil, []string{"HTTP/2.0"}},
		{[]string{"--http1.1"}, []string{"HTTP/1.1"}},
		{[]string{"--http2"}, []string{"HTTP/2.0"}},
		{[]string{"--http1.1", "--http2"}, []string{"HTTP/1.1", "HTTP/2.0"}},
	} {
		clear(seen)
		status, stdout, err := probeFrom(t, append(row.flags, "--insecure", server.URL)...)
		if status != verdictSpoofProof || err != nil {
			t.Errorf("%v: status %d, %v\n%s", row.flags, status, err, stdout)
		}
		for _, proto := range row.want {
			if !strings.Contains(stdout, "over "+proto+"\n") || seen[proto] < 40 {
				t.Errorf("%v: %v requests, and it says:\n%s", row.flags, seen, stdout)
			}
		}
		if len(seen) != len(row.want) {
			t.Errorf("%v: spoken were %v", row.flags, seen)
		}
	}

	// one that only HTTP/2 requests can deceive
	lax := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resolved := peerAddress(r)
		if r.ProtoMajor == 2 {
			resolved = leftmostOf(r, resolved, headerForwardedFor)
		}
		writeProbeAnswer(w, resolved, nil)
	}))
	lax.Config.ErrorLog = log.New(io.Discard, "", 0)
	lax.EnableHTTP2 = true
	lax.StartTLS()
	t.Cleanup(lax.Close)
	for flags, want := range map[string]probeVerdict{"--http1.1": verdictSpoofProof, "--http1.1 --http2": verdictSpoofable} {
		if status, _, err := probeFrom(t, append(strings.Fields(flags), "--insecure", lax.URL)...); status != want || err != nil {
			t.Errorf("%s: status %d, %v", flags, status, err)
		}
	}
}

func TestProbeCommandForMachines(t *testing.T) {
	server := probeServer(t, func(r *http.Request) string {
		if name, password, _ := r.BasicAuth(); name != "name" || password != "sesame" {
			return ""
		}
		return leftmostOf(r, peerAddress(r), "X-Real-Ip")
	})
	target := strings.Replace(server.URL, "http://", "http://name:sesame@", 1) + "/client-ip?a=b#c"
	status, stdout, err := probeFrom(t, "--json", target)
	if status != verdictSpoofable || err != nil {
		t.Fatalf("status %d, %v", status, err)
	}
	if strings.Contains(stdout, "sesame") {
		t.Error("the password is printed")
	}
	var report struct {
		URL     string
		Verdict string
		Exit    int
		Runs    []struct {
			Protocol  string
			Exchanges []struct {
				Headers  []headerLine
				Status   int
				Answer   *probeAnswer
				Outcome  string
				Believed string
			}
			Findings []struct{ Verdict, Says, Mend string }
		}
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatalf("%v:\n%s", err, stdout)
	}
	if report.Verdict != "spoofable" || report.Exit != 10 || len(report.Runs) != 1 || !strings.HasSuffix(report.URL, "/client-ip?a=b") {
		t.Errorf("%+v", report)
	}
	believed := 0
	for _, e := range report.Runs[0].Exchanges {
		if e.Outcome == "believed" {
			believed++
			if e.Believed != "X-Real-IP" || e.Status != 200 || e.Answer == nil || !slices.ContainsFunc(e.Headers, func(l headerLine) bool {
				return l.Name == "X-Real-IP" && l.Value == *e.Answer.Resolved
			}) {
				t.Errorf("%+v", e)
			}
		}
	}
	if believed != 3 { // alone, once more, and among all
		t.Errorf("%d requests were believed", believed)
	}
	if f := report.Runs[0].Findings[0]; f.Verdict != "spoofable" || f.Mend == "" {
		t.Errorf("%+v", f)
	}

	// without an answer too there is one object
	server.Close()
	status, stdout, err = probeFrom(t, "--json", server.URL)
	if status != verdictUnclear || err == nil || !json.Valid([]byte(stdout)) || !strings.Contains(stdout, `"error": "nothing answers`) {
		t.Errorf("status %d, %v:\n%s", status, err, stdout)
	}
}

// What others wrote must not steer the terminal that it is printed to.
func TestProbeCommandPrintsNothingThatSteers(t *testing.T) {
	server := answeringServer(t, func(w http.ResponseWriter, r *http.Request) {
		writeProbeAnswer(w, leftmostOf(r, "", headerForwardedFor), func(a *probeAnswer) {
			a.Source, a.Reason, a.Advice = "\x1b[31m", "\u202e\r\n", "\x1b]0;owned\a"
		})
	})
	_, stdout, _ := probeFrom(t, server.URL)
	for _, r := range stdout {
		if r != '\n' && (r < ' ' || r > '~') {
			t.Fatalf("it prints %q:\n%q", r, stdout)
		}
	}
}

// What is forged is all different, and of the ranges for documentation.
func TestProbeForgeriesClaimAddressesOfNobody(t *testing.T) {
	honest := netip.MustParseAddr("192.0.2.3")
	claimant := &claimant{honest: honest}
	seen := make(map[netip.Addr]string)
	for _, kind := range forgeryKinds() {
		f := kind.forge(claimant)
		for _, claim := range f.claims {
			if before, ok := seen[claim.addr]; ok || claim.addr == honest {
				t.Errorf("%v is claimed by %q and %q", claim.addr, before, f.title)
			}
			seen[claim.addr] = f.title
			if !slices.ContainsFunc([]string{"192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32"}, func(documentation string) bool {
				return netip.MustParsePrefix(documentation).Contains(claim.addr)
			}) {
				t.Errorf("%v is somebody's", claim.addr)
			}
		}
		if f.title == "" {
			t.Errorf("%v has no title", f.lines)
		}
	}
	if len(seen) < 150 {
		t.Errorf("only %d addresses", len(seen))
	}
}

// Names go over the wire as they are spelled, in the order of their lines.
func TestProbeForgeriesOnTheWire(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var mu sync.Mutex
	var wire bytes.Buffer
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				reader := bufio.NewReader(conn)
				for {
					line, err := reader.ReadString('\n')
					if err != nil {
						return
					}
					mu.Lock()
					wire.WriteString(line)
					mu.Unlock()
					if line == "\r\n" {
						const body = `{"resolved":"127.0.0.1","source":"connection","healthy":true}`
						fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
					}
				}
			}()
		}
	}()
	if status, stdout, err := probeFrom(t, "http://"+listener.Addr().String()+"/client-ip"); status != verdictSpoofProof || err != nil {
		t.Fatalf("status %d, %v\n%s", status, err, stdout)
	}
	mu.Lock()
	sent := wire.String()
	mu.Unlock()
	for _, want := range []string{
		"GET /client-ip HTTP/1.1\r\nHost: 127.0.0.1:",
		"\r\nX-Forwarded-For: 192.0.2.1\r\n",
		"\r\nx-forwarded-for: ", "\r\nX-FORWARDED-FOR: ", "\r\nX_Forwarded_For: ", "\r\nX.Forwarded.For: ",
		"\r\nForwarded: for=\"192.0.2.", "\r\nX-Forwarded-For: \r\n", "hello, unknown, 999.1.2.3, \xff\xfe\r\n",
		"\r\nX-Forwarded-For: 192.0.2.80\r\nX-Forwarded-For: 192.0.2.81\r\n",
		"\r\nConnection: keep-alive, X-Forwarded-For, Forwarded, X-Real-IP",
		"PROXY TCP4 192.0.2.",
	} {
		if !strings.Contains(sent, want) {
			t.Errorf("nothing like %q was sent", want)
		}
	}
	first, _, _ := strings.Cut(sent, "\r\n\r\n")
	if strings.Contains(strings.ToLower(first), "forwarded") || strings.Contains(first, "IP:") {
		t.Errorf("the plain request is not plain: %q", first)
	}
}

func TestProbeCommandEndsWhenToldTo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	server := answeringServer(t, func(w http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	cmd := newProbeCommand()
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	cmd.SetArgs([]string{"--timeout=1h", server.URL})
	done := make(chan error)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("no error")
		}
	case <-time.After(10 * time.Second):
		t.Error("it goes on")
	}
}

func TestEdgeLimitCommandIsThere(t *testing.T) {
	if _, ok := caddycmd.Commands()["edge-limit"]; !ok {
		t.Error("caddy has no command edge-limit")
	}
}
