// Asks Tollgate over REST and over RESP, with the standard library only.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

// Answers come within milliseconds. A caller that waits longer has lost its connection.
const timeout = 2 * time.Second

// Answer has the members of a check's answer that most callers need.
type Answer struct {
	Allowed           bool   `json:"allowed"`
	Remaining         int64  `json:"remaining"`
	RetryAfterSeconds int64  `json:"retryAfterSeconds"`
	Message           string `json:"message"`
}

// CheckKey takes one permit of a key. A denial is an answer, not an error.
func CheckKey(client *http.Client, base, token, key string) (Answer, error) {
	return post(client, base+"/api/v1/rate-limit/check", token, map[string]any{"key": key})
}

// CheckRequest checks a request by the rules of the policy.
func CheckRequest(client *http.Client, base, token string, request map[string]any) (Answer, error) {
	return post(client, base+"/api/v1/check", token, request)
}

func post(client *http.Client, url, token string, body any) (Answer, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return Answer{}, err
	}
	request, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return Answer{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	// Read to its end, so that the connection can be used again.
	text, err = io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return Answer{}, err
	}
	if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusTooManyRequests {
		return Answer{}, fmt.Errorf("tollgate answered %d: %s", response.StatusCode, text)
	}
	var answer Answer
	return answer, json.Unmarshal(text, &answer)
}

// Resp is a connection that speaks the protocol of Redis.
type Resp struct {
	connection net.Conn
	reader     *bufio.Reader
}

// Dial connects to the RESP listener. With a token, it authenticates.
func Dial(address, token string) (*Resp, error) {
	connection, err := net.DialTimeout("tcp", address, timeout)
	if err != nil {
		return nil, err
	}
	resp := &Resp{connection, bufio.NewReader(connection)}
	if token != "" {
		if _, err := resp.Do("AUTH", token); err != nil {
			connection.Close()
			return nil, err
		}
	}
	return resp, nil
}

// Do sends a command and reads its reply: a string, an int64, nil or a []any of these.
func (resp *Resp) Do(words ...string) (any, error) {
	if err := resp.connection.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	command := fmt.Sprintf("*%d\r\n", len(words))
	for _, word := range words {
		command += fmt.Sprintf("$%d\r\n%s\r\n", len(word), word)
	}
	if _, err := io.WriteString(resp.connection, command); err != nil {
		return nil, err
	}
	return resp.read()
}

func (resp *Resp) read() (any, error) {
	line, err := resp.reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	if len(line) < 3 {
		return nil, fmt.Errorf("not a reply: %q", line)
	}
	kind, text := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		return text, nil
	case '-':
		return nil, errors.New(text)
	case ':':
		return strconv.ParseInt(text, 10, 64)
	}
	length, err := strconv.Atoi(text)
	if err != nil || length > 1<<20 {
		return nil, fmt.Errorf("not a reply: %q", line)
	}
	if length < 0 {
		return nil, nil
	}
	switch kind {
	case '$':
		bulk := make([]byte, length+2)
		_, err := io.ReadFull(resp.reader, bulk)
		return string(bulk[:length]), err
	case '*':
		var list []any
		for i := 0; i < length; i++ {
			item, err := resp.read()
			if err != nil {
				return nil, err
			}
			list = append(list, item)
		}
		return list, nil
	}
	return nil, fmt.Errorf("not a reply: %q", line)
}

func run(url, address, token string) error {
	if url != "" {
		client := &http.Client{Timeout: timeout}
		answer, err := CheckKey(client, url, token, "user:1")
		if err != nil {
			return err
		}
		fmt.Printf("REST key: allowed=%t remaining=%d\n", answer.Allowed, answer.Remaining)
		answer, err = CheckRequest(client, url, token, map[string]any{"user": "alice", "path": "/api/items"})
		if err != nil {
			return err
		}
		fmt.Printf("REST request: allowed=%t retryAfterSeconds=%d\n", answer.Allowed, answer.RetryAfterSeconds)
	}
	if address == "" {
		return nil
	}
	resp, err := Dial(address, token)
	if err != nil {
		return err
	}
	defer resp.connection.Close()
	// Five integers: limited (0 or 1), limit, remaining, seconds to wait (-1 if allowed), seconds until the limit is full.
	throttled, err := resp.Do("CL.THROTTLE", "user:1", "99", "100", "60")
	if err != nil {
		return err
	}
	fmt.Println("RESP CL.THROTTLE:", throttled)
	// Names and values in turn.
	checked, err := resp.Do("TG.CHECK", "user", "alice", "path", "/api/items")
	if err != nil {
		return err
	}
	fmt.Println("RESP TG.CHECK:", checked)
	return nil
}

func main() {
	url := flag.String("url", "http://127.0.0.1:8080", "the API of Tollgate; empty: no REST")
	address := flag.String("resp", "127.0.0.1:6380", "the RESP listener of Tollgate; empty: no RESP")
	flag.Parse()
	if err := run(*url, *address, os.Getenv("TOLLGATE_TOKEN")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
